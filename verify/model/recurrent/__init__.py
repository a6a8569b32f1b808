"""Layers that keep a recurrent state: their mathematics over draft trees, their part of a cache, and how models call them."""
