"""The drafters for programs other than Outrider's server: numpy and a library in C++, no model, no server.

    from outrider.drafters.library import Resources, Session, index_texts

    session = Session("fusion", Resources(vocabulary=49152))
    session.begin(prompt)                        # token ids
    while not finished:
        tree = session.propose(16)               # a DraftTree of at most 16 nodes; session.propose_chain(8) has no branches
        tokens, top_ids, top_probs = verify(tree)    # the program's: one forward of the target over all nodes
        session.observe(tokens, top_ids, top_probs)  # the accepted tokens and the one after them
    session.end()

A `Session` is one conversation. `Resources` hold the options and tables that all sessions share, and belong to one tokenizer:

- `Resources(options=Options(fusion=FusionOptions(depth=16)))` sets options (`outrider.drafters.options`).
- `Resources(corpus=[index_texts(texts, vocabulary)])` drafts from texts too, and `corpus=datastore.load(folder)` from a
  datastore on disk (`outrider.drafters.tables.datastore`).
- `Resources(corpus=[...], base=base_table.load(file))` begins with a table of n-grams (`outrider.drafters.tables.base_table`).
- `LearnedText` is a corpus of what earlier sessions have said.

How far `fusion` trusts each source at first is a prior that comes with the package; each session learns its own. A target that
samples with keyed noise tells `begin` so (`Keyed`). `Session.state` is what a session has learned.

A drafter of your own is a class with the methods of `outrider.drafters.interface.Drafter`. A package that names a function of
`Resources` under the entry-point group `outrider.drafters` adds it, here and in the server.
"""

from outrider.drafters.interface import Drafter as Drafter
from outrider.drafters.interface import DraftTree as DraftTree
from outrider.drafters.library.keyed import Keyed as Keyed
from outrider.drafters.library.learned import LearnedText as LearnedText
from outrider.drafters.library.session import Session as Session
from outrider.drafters.library.session import index_texts as index_texts
from outrider.drafters.options import Options as Options
from outrider.drafters.registry import Resources as Resources
