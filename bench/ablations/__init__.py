"""`outrider bench ablations`: the papers' tables and figures, repeated with the data and models that are here."""
