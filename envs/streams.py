"""Random numbers by hashing: a draw depends on the seed, the lane and how many were drawn before, on nothing else."""


def integer_hash(x):
    """32-bit integer hash (xor-shift and multiply, twice); Python ints or int64 tensors, the same numbers."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def lane_key(seed: int, lane):
    """Start of the random stream of one lane; its n-th draw is `integer_hash(key + n)`."""
    return integer_hash(integer_hash(seed & 0xFFFFFFFF) ^ integer_hash(lane + 0x9E3779B9))


class Stream:
    """The stream of a lane: `stream(n)` is uniform in [0, n), and (key, draws) is all its state."""

    __slots__ = ("key", "draws")

    def __init__(self, seed: int, lane: int) -> None:
        self.key = lane_key(seed, lane)
        self.draws = 0

    def __call__(self, n: int) -> int:
        self.draws += 1
        return integer_hash((self.key + self.draws) & 0xFFFFFFFF) % n
