"""Counter-based random numbers: a draw is a hash of the seed, the lane and the number of draws so far."""


def integer_hash(x):
    """32-bit hash (xor-shift and multiply, twice). Takes a Python int or an int64 tensor, with equal results."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def lane_key(seed: int, lane):
    """Key of a lane's random stream (`lane`: int or int64 tensor). Its n-th draw is `integer_hash(key + n)`."""
    seed_hash = integer_hash(seed & 0xFFFFFFFF)
    lane_hash = integer_hash(lane + 0x9E3779B9)
    return integer_hash(seed_hash ^ lane_hash)


class Stream:
    """The random stream of one lane. `stream(n)` is uniform in [0, n); the state is (key, draws)."""

    __slots__ = ("key", "draws")

    def __init__(self, seed: int, lane: int) -> None:
        self.key = lane_key(seed, lane)
        self.draws = 0

    def __call__(self, n: int) -> int:
        self.draws += 1
        number = (self.key + self.draws) & 0xFFFFFFFF
        return integer_hash(number) % n
