"""The interface to a draft model, and drafting that combines it with tables."""
