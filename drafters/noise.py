"""The keys of the target's noise: splitmix64 of a request's seed and an output position, on Python integers."""

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """One step of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def prompt_seed(seed: int, tokens: int) -> int:
    """The seed for a prompt of this many tokens: each turn of a conversation has noise of its own."""
    return mix(seed ^ mix(tokens))


def position_key(seed: int, position: int) -> int:
    """The key of an output position, whatever the token."""
    return mix(mix(seed) ^ position * 0xD1B54A32D192ED03 & MASK)
