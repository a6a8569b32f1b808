"""What guesses: drafters and the DraftTree they all speak. Imports neither `server` nor `verify`, and no torch."""
