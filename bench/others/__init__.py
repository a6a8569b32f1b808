"""`python -m bench.others`: what other programs draft on recorded answers, beside Outrider's drafters."""
