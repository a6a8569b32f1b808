"""Fifteen minutes of mixed requests to two servers, with trouble of every kind beside them."""
