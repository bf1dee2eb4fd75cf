"""The MettaGrid rule book rule by rule, and the batched version against it."""

import random
import re
import shutil
import warnings
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import envs  # noqa: F401  registers the ids
from benchmarks.metta_parts import ARENAS
from benchmarks.players import metta_action, random_hearts, scripted_hearts
from envs.metta.arena import MettaArena, Thing
from envs.metta.batch import MettaBatch
from envs.metta.rules import (
    ACTIONS,
    ARMOR,
    BACK,
    BUSY,
    CARRY,
    CENTRE,
    FIRST_ITEM,
    FORWARD,
    FROZEN,
    GET,
    HEART,
    ITEMS,
    LASER,
    NEAREST,
    NOOP,
    ORIENTATION,
    PAINT,
    PUT,
    REACH,
    ROTATE,
    STATS,
    SWAP,
    TOKENS,
    VARIANTS,
    VIEW,
    Recipe,
    Rules,
)

UP, DOWN, LEFT, RIGHT = range(4)
ORE, BATTERY = ITEMS.index("ore_red"), ITEMS.index("battery_red")
# Everything close together, lasers for the taking: agents shoot, freeze and rob each other all the time.
BATTLE = dict(
    size=9, easy=True, rewards="shaped", max_steps=120, freeze=5,
    objects={"mine_red": 3, "generator_red": 3, "altar": 2, "temple": 1, "lasery": 3, "armory": 1, "block": 8},
    recipes={
        "lasery": Recipe(10, {}, {"laser": 1}, 3), "mine_red": Recipe(2, {}, {"ore_red": 1}, 3),
        "armory": Recipe(9, {}, {"armor": 2}, 9), "generator_red": Recipe(5, {"ore_red": 1}, {"battery_red": 1}, 0),
    },
)  # fmt: skip
CROWD = dict(size=9, agents=30, max_steps=100, objects={"mine_red": (0, 6), "block": 30, "altar": 5})
SHORT = dict(max_steps=60)
SETTINGS = {
    "arena": dict(SHORT, lanes=5, steps=250),
    "four arenas, easy": dict(SHORT, lanes=2, steps=100, instances=4, easy=True, rewards="shaped"),
    "navigation": dict(VARIANTS["MettaNavigation-v0"], **SHORT, lanes=4, steps=150),
    "battle": dict(BATTLE, lanes=5, steps=400),
    "battle of three": dict(BATTLE, lanes=2, steps=150, instances=3),
    "work": dict(BATTLE, lanes=2, steps=150, rewards="work"),
    "tokens to spare": dict(CROWD, lanes=2, steps=130),
}


@pytest.fixture(autouse=True)
def one_thread():
    """What is this small is faster so, and does not slow down when something else is running."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def thing_at(arena: MettaArena, row: int, column: int) -> Thing | None:
    return arena.grid[row][column]


def mixed_action(arena: MettaArena, body: Thing, rng: np.random.Generator) -> int:
    """Useful things mostly, attacks where there is a laser, anything at times: every rule gets its turn."""
    draw = rng.random()
    if draw < 0.25:
        return int(rng.integers(25))
    targets = [n + 1 for n, reach in enumerate(REACH) if thing_at(arena, *arena._cell(body, *reach)) in arena.bodies]
    if draw < 0.8 and body.inventory[LASER] and targets:
        return int(rng.choice([NEAREST, *targets]))
    thing = thing_at(arena, *arena._cell(body, 1))
    if thing and thing.name in arena.rules.book and draw < 0.7:
        return GET if draw < 0.6 else PUT
    if thing and draw < 0.7:
        return SWAP
    return metta_action(arena, body) if draw < 0.8 else int(rng.choice([FORWARD, ROTATE + rng.integers(4)]))


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_plays_by_the_rule_book(name: str) -> None:
    """Tokens, rewards, ends and statistics; also along the path of CUDA, all of whose shapes are fixed."""
    rules = dict(SETTINGS[name])
    lanes, steps = rules.pop("lanes"), rules.pop("steps")
    episodes, stats = play_both(rules, lanes, steps, fixed_shapes=(False, True))
    assert episodes >= lanes
    if "battle" in name:
        needed = "laser.lost armor.lost attack.win attack.loss attack.blocked frozen_ticks heart.get ore_red.stolen"
        assert not [key for key in needed.split() if not stats[key]]
    if name == "tokens to spare":
        assert stats["tokens_dropped"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_batch_plays_twenty_whole_episodes_by_the_rule_book(name: str) -> None:
    assert play_both(VARIANTS[name], lanes=10, steps=2000)[0] >= 20


def play_both(
    rules: dict, lanes: int, steps: int, fixed_shapes: tuple[bool, ...] = (False,)
) -> tuple[int, dict[str, int]]:
    """Same actions for the rule book and a batch of each kind, everything compared after each step.

    Returns how many episodes ended and the sums of their statistics.
    """
    books = [MettaArena(lane=lane, **rules) for lane in range(lanes)]
    batches = [MettaBatch(lanes, seed=5, **rules) for _ in fixed_shapes]
    for batch, fixed in zip(batches, fixed_shapes):
        batch.fixed_shapes = fixed
    agents, rng, episodes = batches[0].rules.num_agents, np.random.default_rng(0), 0
    total = np.zeros(len(STATS), int)
    random.seed(0)

    def stacked(of: list[dict]) -> np.ndarray:
        return np.stack([value for one in of for value in one.values()])

    first = stacked([book.reset(seed=5)[0] for book in books])
    for batch in batches:
        np.testing.assert_array_equal(first, batch.reset())
    for _ in range(steps):
        actions = [mixed_action(book, body, rng) for book in books for body in book.bodies]
        parts = np.array(actions).reshape(lanes, agents)
        results = [book.step(dict(zip(book.agents, part))) for book, part in zip(books, parts)]
        book_stats = np.array([list(stats.values()) for book in books for stats in book.stats])
        final = [result[0] for result in results]
        obs_after = list(final)
        for lane, book in enumerate(books):
            if not book.agents:
                episodes += 1
                total += book_stats.reshape(lanes, agents, -1)[lane].sum(0)
                obs_after[lane] = book.reset()[0]
        for batch in batches:
            obs, reward, terminated, truncated, info = batch.step(torch.tensor(actions))
            np.testing.assert_array_equal(stacked(final), info["final_obs"])
            np.testing.assert_allclose(stacked([result[1] for result in results]), reward, atol=1e-6)
            np.testing.assert_array_equal(stacked([result[3] for result in results]), truncated)
            np.testing.assert_array_equal(book_stats, info["stats"])
            np.testing.assert_array_equal(book_stats[:, STATS.index("heart.get")], info["hearts"])
            assert not terminated.any()
            np.testing.assert_array_equal(stacked(obs_after), obs)
    for batch in batches:
        assert batch.finished[0] == episodes * agents
    return episodes, dict(zip(STATS, total))


def test_a_lane_does_not_depend_on_the_others_and_a_seed_repeats() -> None:
    few, many, other = MettaBatch(2, seed=2, **BATTLE), MettaBatch(9, seed=2, **BATTLE), MettaBatch(2, seed=3, **BATTLE)
    assert torch.equal(few.reset(), many.reset()[: few.num_agents])
    assert len({tuple(lane.tolist()) for lane in many.obs.view(9, -1)}) == 9
    assert not torch.equal(other.reset(), few.obs)
    rng = np.random.default_rng(0)
    for _ in range(200):
        actions = torch.as_tensor(rng.integers(25, size=many.num_agents))
        few_obs, many_obs = few.step(actions[: few.num_agents])[0], many.step(actions)[0]
        assert torch.equal(few_obs, many_obs[: few.num_agents])
    lanes = many_obs.view(9, -1)
    assert len({tuple(lane.tolist()) for lane in lanes}) == 9  # and no two play the same game


def state_of(batch: MettaBatch) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in batch.state_dict().items()}


@pytest.mark.parametrize("loads", ["cpu", "fixed shapes"])
@pytest.mark.parametrize("saves", ["cpu", "fixed shapes"])
def test_a_saved_game_goes_on_wherever_it_is_loaded(saves: str, loads: str) -> None:
    """Also over the end of episodes, for which the path of CUDA has maps ready and that of the CPU has not."""
    rules = dict(BATTLE, max_steps=40)
    first, second = MettaBatch(3, seed=1, **rules), MettaBatch(3, seed=8, **rules)
    first.fixed_shapes, second.fixed_shapes = saves != "cpu", loads != "cpu"
    first.reset()
    rng = np.random.default_rng(0)
    actions = iter(torch.as_tensor(rng.integers(25, size=(125, first.num_agents))))
    while first.clock[2] < first.limit[2] - 1:  # the next map of that game is needed at once
        first.step(next(actions))
    second.load_state_dict(state_of(first))
    assert torch.equal(first.obs, second.obs) and torch.equal(first.episode_key, second.episode_key)
    for action in actions:
        ours, theirs = first.step(action), second.step(action)
        for our, their in zip(ours[:4], theirs[:4]):
            assert torch.equal(our, their)
        for name in ours[4]:
            assert torch.equal(ours[4][name], theirs[4][name])
    assert first.episode.min() >= 2
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def test_a_loaded_game_looks_as_it_did_from_the_first_step_on() -> None:
    first, second = MettaBatch(2, seed=1, **BATTLE), MettaBatch(2, seed=2, **BATTLE)
    first.reset(), second.reset()
    rng = np.random.default_rng(0)
    for step in range(100):
        for batch in (first, second):
            batch.step(torch.as_tensor(rng.integers(25, size=batch.num_agents)))
        if step % 9 == 0:
            first.load_state_dict(state_of(second))
            assert torch.equal(first.obs, second.obs) and torch.equal(first.value, second.value)
            assert torch.equal(first.tokens.count, second.tokens.count)
            shown = torch.arange(16) < first.tokens.count[:, None]  # the others may be left over from other things
            assert (first.tokens.table == second.tokens.table)[:-TOKENS].view(-1, 16)[shown].all()


def test_many_lanes_with_fixed_shapes_play_the_same() -> None:
    """Enough of them that some first episodes end at once, before the spare map of the second had its turn."""
    plain, masked = (MettaBatch(150, seed=4, **dict(BATTLE, agents=2)) for _ in range(2))
    masked.fixed_shapes = True
    assert torch.equal(plain.reset(), masked.reset())
    rng = np.random.default_rng(0)
    for _ in range(150):
        action = torch.as_tensor(rng.integers(25, size=300))
        for ours, theirs in zip(plain.step(action)[:4], masked.step(action)[:4]):
            assert torch.equal(ours, theirs)
    assert plain.episode.min() >= 1


COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


def armed(lanes: int, **rules) -> MettaBatch:
    """A game with fixed shapes, as on CUDA, whose agents all have lasers and some of them armor."""
    batch = MettaBatch(lanes, seed=1, **rules)
    batch.fixed_shapes = True
    batch.reset()
    state = state_of(batch)
    state["inventory"][batch.agent_row, LASER] = 20
    state["inventory"][batch.agent_row[::2], ARMOR] = 2
    batch.load_state_dict(state)
    return batch


def plays_the_same(plain: MettaBatch, compiled: MettaBatch, step: Callable, steps: int) -> None:
    rng = np.random.default_rng(0)
    most = torch.zeros(len(STATS), dtype=torch.int32)
    for _ in range(steps):
        action = torch.as_tensor(rng.integers(25, size=plain.num_agents))
        ours, theirs = plain.step(action), step(action)
        for our, their in zip(ours[:4], theirs[:4]):
            assert torch.equal(our, their)
        for name in ours[4]:
            assert torch.equal(ours[4][name], theirs[4][name]), name
        most = most.maximum(ours[4]["stats"].amax(0))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, compiled.state_dict()[name]), name
    needed = "attack.win attack.loss attack.blocked armor.lost frozen_ticks laser.stolen ore_red.get"
    assert not [name for name in needed.split() if not most[STATS.index(name)]] and plain.episode.min() >= 1


def test_a_step_with_fixed_shapes_is_one_graph_and_plays_the_same() -> None:
    torch._dynamo.reset()
    plain, compiled = armed(3, **BATTLE), armed(3, **BATTLE)
    plays_the_same(plain, compiled, torch.compile(compiled.step, fullgraph=True, backend="aot_eager"), steps=200)


class Launches(TorchDispatchMode):
    """Counts operations; a view of a tensor is none."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += not function.is_view
        return function(*args, **(kwargs or {}))


@COMPILER
@pytest.mark.slow
def test_a_compiled_step_is_few_launches_and_plays_the_same(monkeypatch) -> None:
    """A tenth of the 1,914 that an eager step once was, by the kernels that inductor writes for it on a CPU."""
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")  # not optimised, which takes g++ three times as long
    rules = BATTLE | dict(max_steps=25)
    plain, compiled = armed(65, **rules), armed(65, **rules)
    action = torch.zeros(plain.num_agents, dtype=torch.int64)
    with Launches() as eager:
        plain.step(action)
    torch._dynamo.reset()
    step = torch.compile(compiled.step, fullgraph=True)
    # Sums into rows that are named by a tensor are kernels on CUDA too.
    options = {"force_disable_caches": True, "cpp.fallback_scatter_reduce_sum": False}
    with inductor_config.patch(options):
        _, (code,) = run_and_get_code(step, action)
    calls = len(re.findall(r"= (?:torch\.ops\.|aten\.|extern_kernels\.)", code))
    loops = len(re.findall(r"for\(int64_t x0=", code))
    assert loops + calls <= 191 and eager.number <= 1450
    plays_the_same(plain, compiled, step, steps=30)


# The rules, one by one, in an arena with nothing in it but what is put there.


def empty(agents: int = 1, **rules) -> MettaArena:
    """Agents side by side from row 10, column 10 on, all facing up."""
    arena = MettaArena(size=15, agents=agents, random_first_length=False, **({"objects": {}} | rules))
    arena.reset(seed=0)
    for body in arena.bodies:
        arena.grid[body.row][body.column] = None
    for i, body in enumerate(arena.bodies):
        body.row, body.column = 10, 10 + i
        arena.grid[10][10 + i] = body
    return arena


def put(arena: MettaArena, name: str, row: int, column: int, **held: int) -> Thing:
    thing = arena.grid[row][column] = Thing(name, row, column)
    for item, number in held.items():
        thing.inventory[ITEMS.index(item)] = number
    if name in arena.rules.book:
        arena.converters.append(thing)
        arena._start_converting(thing)
    return thing


def act(arena: MettaArena, *actions: int) -> tuple[list[np.ndarray], list[float]]:
    """One step; agents without an action do nothing."""
    actions = [*actions, *[NOOP] * (len(arena.agents) - len(actions))]
    obs, rewards, *_ = arena.step(dict(zip(arena.agents, actions)))
    return list(obs.values()), list(rewards.values())


def features(obs: np.ndarray, place: int = CENTRE) -> dict[int, int]:
    return {int(feature): int(value) for location, feature, value in obs if location == place}


def test_there_are_25_actions_in_alphabetical_order() -> None:
    assert len(ACTIONS) == 25 and ACTIONS[NEAREST] == (1, 0) and ACTIONS[PAINT + 3] == (2, 3) and ACTIONS[GET] == (3, 0)
    assert ACTIONS[FORWARD : NOOP + 1] == ((4, 0), (4, 1), (5, 0)) and ACTIONS[PUT] == (6, 0)
    assert ACTIONS[ROTATE : SWAP + 1] == ((7, 0), (7, 1), (7, 2), (7, 3), (8, 0))


def test_a_mine_works_a_tick_rests_and_stops_when_full() -> None:
    arena = empty()
    mine = put(arena, "mine_red", 9, 10)
    stock = []
    for _ in range(400):
        act(arena)
        stock.append(mine.inventory[ORE])
    grown = [tick + 1 for tick in range(1, 400) if stock[tick] > stock[tick - 1]]
    assert stock[0] == 1 and grown == [52, 103, 154, 205] and stock[-1] == 5 and mine.timer == 0
    obs, _ = act(arena, GET)
    assert arena.bodies[0].inventory[ORE] == 5 and mine.inventory[ORE] == 0 and mine.timer == 51
    assert features(obs[0], CENTRE - 16)[BUSY] == 1
    act(arena)
    assert mine.inventory[ORE] == 1


def test_a_converter_takes_one_recipe_a_put_and_starts_by_itself() -> None:
    arena = empty(rewards="shaped")
    altar, body = put(arena, "altar", 9, 10), arena.bodies[0]
    body.inventory[BATTERY] = 5
    act(arena, PUT)
    assert (body.inventory[BATTERY], altar.inventory[BATTERY], altar.timer) == (2, 0, 11)
    act(arena, PUT)  # two more, not enough for a heart; the first is done
    assert (body.inventory[BATTERY], altar.inventory[BATTERY], altar.inventory[HEART]) == (0, 2, 1)
    assert act(arena, GET)[1] == [1.0] and body.inventory[HEART] == 1
    assert act(arena, PUT)[1] == [0.0] and arena.stats[0]["failed"] == 1
    easy = empty(easy=True)
    altar = put(easy, "altar", 9, 10)
    easy.bodies[0].inventory[BATTERY] = 2
    act(easy, PUT)
    act(easy, PUT)
    assert altar.inventory[BATTERY] == 1 and altar.inventory[HEART] == 1 and altar.timer == 10
    for _ in range(10):
        act(easy)
    assert altar.timer == 11 and altar.inventory[BATTERY] == 0  # the next begins as soon as it has cooled


def test_carrying_is_limited() -> None:
    arena = empty()
    mine, body = put(arena, "mine_red", 9, 10, ore_red=4), arena.bodies[0]
    body.inventory[ORE] = CARRY[ORE] - 1
    act(arena, GET)
    assert body.inventory[ORE] == 50 == CARRY[ORE] and mine.inventory[ORE] == 4 and CARRY[HEART] == 255
    act(arena, GET)
    assert arena.stats[0]["failed"] == 1


def test_rewards_are_changes_of_what_counts() -> None:
    arena = empty(rewards="shaped")
    put(arena, "mine_red", 9, 10, ore_red=1)
    put(arena, "generator_red", 11, 10)
    assert act(arena, GET)[1] == [0.1] and arena.bodies[0].inventory[ORE] == 2  # the second does not count
    act(arena, ROTATE + DOWN)
    obs, rewards = act(arena, PUT)
    assert rewards == [0.0]
    obs, rewards = act(arena, PUT)  # losing the last costs what the first earned; the token knows no loss
    assert rewards == [-0.1] and features(obs[0])[11] == 0
    obs, rewards = act(arena, GET)
    assert rewards == [0.8] and features(obs[0])[11] == 80 and arena.stats[0]["hundredths"] == 80
    hearts = empty()
    put(hearts, "mine_red", 9, 10, ore_red=1)
    assert act(hearts, GET)[1] == [0.0]


def test_work_is_rewarded_whoever_has_the_heart() -> None:
    arena = empty(rewards="work", easy=True)
    generator, body = put(arena, "generator_red", 9, 10), arena.bodies[0]
    body.inventory[ORE] = 4
    assert act(arena, PUT)[1] == [1.1]  # it begins at once,
    assert act(arena, PUT)[1] == [1.1]  # this one is next,
    assert act(arena, PUT)[1] == [0.55] and act(arena, PUT)[1] == [0.36] and generator.inventory[ORE] == 3
    assert act(arena, PUT)[1] == [0.0]  # nothing left to put
    assert act(arena, GET)[1] == [0.1] and body.inventory[BATTERY] == 1
    arena.grid[9][10] = None
    put(arena, "altar", 9, 10, heart=3)
    obs, rewards = act(arena, GET)  # three hearts at once
    assert rewards == [0.3] and features(obs[0])[11] == 30
    assert act(arena, PUT)[1] == [1.1] and arena.stats[0]["hundredths"] == 110 + 110 + 55 + 36 + 10 + 30 + 110
    arena.grid[9][10] = None
    put(arena, "lasery", 9, 10, laser=1)
    body.inventory[ORE] = 1
    assert act(arena, PUT)[1] == act(arena, GET)[1] == [0.0] and body.inventory[LASER] == 2
    arena.grid[9][10] = None
    put(arena, "mine_red", 9, 10, ore_red=4)  # and one more is dug in this step
    assert act(arena, GET)[1] == [0.5]


def test_moving_turning_and_swapping() -> None:
    arena = empty()
    body = arena.bodies[0]
    act(arena, FORWARD)
    assert (body.row, body.column) == (9, 10)
    act(arena, BACK)
    act(arena, BACK)
    assert (body.row, body.column, body.heading) == (11, 10, UP)
    for heading in (LEFT, RIGHT, DOWN):
        obs, _ = act(arena, ROTATE + heading)
        assert body.heading == heading == features(obs[0])[ORIENTATION]
    block = put(arena, "block", 12, 10)
    act(arena, FORWARD)
    assert (body.row, arena.stats[0]["failed"]) == (11, 1)
    act(arena, SWAP)
    assert (body.row, block.row) == (12, 11) and arena.grid[12][10] is body and arena.grid[11][10] is block
    put(arena, "wall", 13, 10)
    act(arena, SWAP)
    assert body.row == 12


def test_colors() -> None:
    arena = empty()
    body, seen = arena.bodies[0], []
    for change in (0, 2, 2, 0, 3, 1, 1, 1, 1):
        act(arena, PAINT + change)
        seen.append(body.color)
    assert seen == [1, 2, 4, 5, 2, 1, 0, 0, 0]
    body.color = 200
    act(arena, PAINT + 2)
    assert body.color == 255


def test_a_laser_freezes_and_robs_and_armor_stops_it() -> None:
    arena = empty(agents=2)
    shooter, target = arena.bodies
    target.row, target.column = 8, 11  # two ahead and one to the right: attack 4
    arena.grid[10][11], arena.grid[8][11] = None, target
    act(arena, 4)
    assert arena.stats[0]["failed"] == 1  # nothing to shoot with
    shooter.inventory[LASER] = 6
    shooter.inventory[HEART] = 254
    target.inventory[HEART], target.inventory[ORE], target.inventory[ARMOR] = 3, 7, 1
    act(arena, 4)
    assert target.inventory[ARMOR] == 0 and target.timer == 0 and target.inventory[ORE] == 7
    act(arena, 5)  # straight ahead there is nobody, and the laser is gone
    assert shooter.inventory[LASER] == 4 and target.timer == 0
    act(arena, 0)
    assert shooter.inventory[LASER] == 4  # attack 0 always fails
    obs, rewards = act(arena, 4)
    assert shooter.inventory[ORE] == 7 and shooter.inventory[HEART] == 255 and target.inventory[HEART] == 2
    assert target.timer == 9 and rewards == [1.0, -1.0]  # it lost its first turn in the same step
    assert features(obs[1])[FROZEN] == 1
    target.inventory[ORE] = 1
    act(arena, NEAREST)
    assert target.timer == 9 and shooter.inventory[ORE] == 7  # frozen again, but robbed only once
    for _ in range(9):
        act(arena, NOOP, FORWARD)
    assert target.row == 8 and target.timer == 0
    act(arena, NOOP, FORWARD)
    assert target.row == 7
    stats = arena.stats
    assert (stats[0]["attack.win"], stats[0]["attack.blocked"], stats[1]["attack.loss"]) == (1, 1, 1)
    assert stats[1]["frozen_ticks"] == 11 and stats[0]["ore_red.stolen"] == 7 == stats[1]["ore_red.lost"]


@pytest.mark.parametrize("heading", range(4))
def test_where_attacks_land(heading: int) -> None:
    ahead = ((-1, 0), (1, 0), (0, -1), (0, 1))[heading]
    right = ((0, 1), (0, -1), (-1, 0), (1, 0))[heading]
    for attack in range(1, 10):
        arena = empty(agents=2)
        shooter, target = arena.bodies
        steps, aside = 1 + (attack - 1) // 3, 1 - (attack - 1) % 3
        arena.grid[target.row][target.column] = None
        target.row, target.column = 10 + steps * ahead[0] + aside * right[0], 10 + steps * ahead[1] + aside * right[1]
        arena.grid[target.row][target.column] = target
        shooter.heading = heading
        shooter.inventory[LASER] = 1
        act(arena, attack)
        assert target.timer == 9


def test_the_nearest_attack_prefers_near_and_middle() -> None:
    arena = empty(agents=4)
    for body, (row, column) in zip(arena.bodies[1:], [(9, 11), (8, 10), (9, 9)]):
        arena.grid[body.row][body.column] = None
        body.row, body.column = row, column
        arena.grid[row][column] = body
    arena.bodies[0].inventory[LASER] = 3
    act(arena, NEAREST)
    assert [body.timer for body in arena.bodies] == [0, 9, 0, 0]
    arena.grid[9][11] = None
    act(arena, NEAREST)
    assert [body.timer for body in arena.bodies[2:]] == [0, 9]


def test_frozen_agents_can_be_swapped_with_others_not() -> None:
    arena = empty(agents=2)
    pusher, other = arena.bodies
    pusher.heading = RIGHT
    act(arena, SWAP)
    assert (pusher.column, other.column) == (10, 11)
    other.timer = 5
    act(arena, SWAP)
    assert (pusher.column, other.column) == (11, 10)


def test_attacks_come_first_the_rest_in_random_order() -> None:
    for seed in range(8):  # the target flees, but the shot comes first, whoever's turn is first
        arena = empty(agents=2)
        arena.episode_key += seed * 999
        shooter, target = arena.bodies
        shooter.heading, shooter.inventory[LASER] = RIGHT, 1
        act(arena, NEAREST, FORWARD)
        assert target.row == 10 and target.timer == 9
    winners = set()
    for seed in range(20):  # both step on the cell between them
        arena = empty(agents=2)
        arena.episode_key += seed * 999
        left, right = arena.bodies
        arena.grid[10][11], arena.grid[10][12], right.column = None, right, 12
        left.heading, right.heading = RIGHT, LEFT
        act(arena, FORWARD, FORWARD)
        assert (left.column, right.column) in ((11, 12), (10, 11))
        winners.add(left.column)
    assert winners == {10, 11}


def test_episodes_are_cut_and_only_the_first_at_random() -> None:
    arena = MettaArena(max_steps=40)
    lengths = []
    arena.reset(seed=6)
    while len(lengths) < 3:
        *_, terminated, truncated, infos = arena.step(dict.fromkeys(arena.agents, NOOP))
        assert not any(terminated.values()) and len(set(truncated.values())) == 1
        if truncated["agent_0"]:
            assert arena.agents == [] and infos["agent_5"]["episode"]["success"] == arena.clock
            lengths.append(arena.clock)
            arena.reset()
    assert lengths[1:] == [40, 40]
    firsts = MettaBatch(400, seed=0, max_steps=40)
    firsts.reset()
    assert firsts.limit.min() <= 3 and firsts.limit.max() >= 38 and abs(firsts.limit.float().mean() - 20.5) < 2.5
    assert MettaBatch(9, random_first_length=False).limit.eq(0).all() and Rules().max_steps == 1000


def test_tokens_stand_nearest_first_after_the_four_of_the_episode() -> None:
    arena = empty(agents=2, max_steps=510)
    put(arena, "wall", 10, 5)
    put(arena, "block", 7, 10)
    mine = put(arena, "mine_red", 9, 9, ore_red=2)
    obs, _ = act(arena, PAINT + 2)
    first = obs[0]
    assert first[:4].tolist() == [[CENTRE, 8, 0], [CENTRE, 9, 2], [CENTRE, 10, 2], [CENTRE, 11, 0]]
    obs, _ = act(arena, PAINT)
    first = obs[0]
    assert first[0].tolist() == [CENTRE, 8, 1] and first.dtype == np.uint8 and first.shape == (TOKENS, 3)
    assert first[4:9].tolist() == [[CENTRE, 0, 0], [CENTRE, 1, 0], [CENTRE, 3, 0], [CENTRE, 4, 0], [CENTRE, 5, 1]]
    assert mine.inventory[ORE] == 3
    at_mine, at_block, at_wall = CENTRE - 17, CENTRE - 48, CENTRE - 5
    assert first[9:14, 0].tolist() == [CENTRE + 1] * 5  # the other agent
    assert first[14:18].tolist() == [[at_mine, 0, 2], [at_mine, 5, 0], [at_mine, BUSY, 1], [at_mine, FIRST_ITEM, 3]]
    assert first[18:21].tolist() == [[at_block, 0, 14], [at_block, 7, 1], [at_wall, 0, 1]]
    assert (first[first[:, 0] != 255][21:, 1] == 0).all()  # the outer wall, farther away
    distance = [abs(place // 16 - VIEW) + abs(place % 16 - VIEW) for place in first[first[:, 0] != 255, 0].tolist()]
    assert distance == sorted(distance) and (first[len(distance) :] == 255).all()


def test_what_is_farthest_is_dropped_when_tokens_run_out() -> None:
    arena = empty()
    for row in range(5, 20):
        for column in range(5, 20):
            if (row, column) != (10, 10):
                put(arena, "block", row, column)
    obs, _ = act(arena)
    assert (obs[0] != 255).any(1).all() and arena.stats[0]["tokens_written"] == TOKENS
    assert arena.stats[0]["tokens_dropped"] == 4 + 5 + 120 * 2 - TOKENS
    assert features(obs[0], CENTRE + 16) and not features(obs[0], 0)


def test_presets_hold_what_they_should() -> None:
    arena = MettaArena(**VARIANTS["MettaArena-v0"])
    arena.reset(seed=1)
    names = [thing.name for row in arena.grid for thing in row if thing]
    assert arena.rules.shape == (35, 35) and names.count("agent") == 6 and names.count("wall") == 35**2 - 25**2 + 20
    assert [names.count(name) for name in ("mine_red", "generator_red", "altar", "lasery", "armory", "block")] == [
        10, 5, 5, 1, 1, 20]  # fmt: skip
    assert Rules(instances=4).shape == (60, 60) and Rules(instances=4).num_agents == 24
    navigation = MettaArena(**VARIANTS["MettaNavigation-v0"])
    counts = set()
    for seed in range(10):
        navigation.reset(seed=seed)
        for corner in navigation.rules.corners:
            room = [(altar.row - corner[0], altar.column - corner[1]) for altar in navigation.converters]
            counts.add(sum(0 <= row < 25 and 0 <= column < 25 for row, column in room))
        assert all(altar.inventory[HEART] == 1 for altar in navigation.converters)
    assert min(counts) < 18 and max(counts) > 42 and min(counts) >= 10 and max(counts) <= 50


def test_terrain_cuts_nothing_off() -> None:
    shares = []
    for seed in range(30):
        arena = MettaArena(agents=1, terrain=True, objects={}, size=15 + seed % 2)
        arena.reset(seed=seed)
        cells = [(row, column) for row in range(arena.rules.shape[0]) for column in range(arena.rules.shape[1])]
        free = {cell for cell in cells if not (thing := arena.grid[cell[0]][cell[1]]) or thing.name == "agent"}
        reached, queue = set(), [next(iter(free))]
        while queue:
            row, column = queue.pop()
            if (row, column) in free - reached:
                reached.add((row, column))
                queue += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        assert reached == free
        shares.append(len(free) / arena.rules.size**2)
    assert min(shares) < 0.7 and max(shares) > 0.95


@pytest.mark.parametrize(
    "rules, names",
    [(dict(size=8), "size 8 .* 68: size 9"), (dict(size=5, objects={"wall": 9999}), "size 60|no size"),
     (dict(instances=5), "instances 5"), (dict(size=4), "size 4"), (dict(agents=0), "agents 0"),
     (dict(rewards="gold"), "gold"), (dict(max_steps=0), "max_steps 0"), (dict(objects={"bank": 1}), "bank"),
     (dict(objects={"altar": (5, 2)}), "altar"), (dict(freeze=0), "freeze 0"),
     (dict(size=40, agents=254, objects={}), "254"), (dict(size=25, terrain=True, objects={"altar": 400}), "size")],
)  # fmt: skip
def test_rules_nobody_can_play_by_are_refused(rules: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Rules(**rules)
    with pytest.raises(ValueError, match="num_games 0"):
        MettaBatch(0)


@pytest.mark.parametrize("action", [25, -1, 2.7, None, float("nan")])
def test_an_action_that_does_not_exist_is_refused(action) -> None:
    arena = empty()
    with pytest.raises(ValueError, match=f"action {action} of agent_0: must be"):
        act(arena, action)
    assert arena.clock == 0
    vector = gym.make_vec("MettaArena-v0", num_envs=6).unwrapped
    vector.reset(seed=1)
    for actions in ([action] * 6, [NOOP] * 5 + [action], action, [1], [[NOOP] * 6]):
        with pytest.raises(ValueError, match="actions"):
            vector.step(actions)
    assert vector.batch.clock.eq(0).all()


def test_pettingzoo_finds_nothing_to_complain_about() -> None:
    test = pytest.importorskip("pettingzoo.test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test.parallel_api_test(MettaArena(max_steps=50), num_cycles=60)
        test.parallel_seed_test(lambda: MettaArena(max_steps=20), num_cycles=30)


def test_spaces_are_the_same_objects_and_can_be_seeded() -> None:
    arena, other = MettaArena(), MettaArena()
    assert arena.unwrapped is arena and arena.max_num_agents == 6 and arena.num_agents == 0
    arena.reset(seed=0)
    assert arena.num_agents == 6
    samples = []
    for env in (arena, other):
        for i, agent in enumerate(env.possible_agents):
            assert env.action_space(agent) is env.action_space(agent)
            assert env.observation_space(agent) is env.observation_space(agent)
            env.action_space(agent).seed(i)
        samples.append([[env.action_space(agent).sample() for agent in env.possible_agents] for _ in range(20)])
    assert samples[0] == samples[1] and len({agent for step in samples[0] for agent in step}) > 10
    assert len({id(arena.action_space(agent)) for agent in arena.possible_agents}) == 6
    arena.close()


def test_vector_env_is_numpy_with_agents_as_lanes() -> None:
    with pytest.raises(ValueError, match="multiple of 6"):
        gym.make_vec("MettaArena-v0", num_envs=8)
    vector = gym.make_vec("MettaArena-v0", num_envs=12, max_steps=15)
    obs, _ = vector.reset(seed=7)
    books = [MettaArena(lane=lane, max_steps=15) for lane in range(2)]
    expected = [value for book in books for value in book.reset(seed=7)[0].values()]
    np.testing.assert_array_equal(obs, expected)
    assert vector.observation_space.contains(obs)
    ended = 0
    for _ in range(40):
        obs, reward, terminated, truncated, infos = vector.step(np.full(12, FORWARD))
        for lane, book in enumerate(books):
            final = book.step(dict.fromkeys(book.agents, FORWARD))[0]
            part = slice(lane * 6, lane * 6 + 6)
            assert truncated[part].all() == (not book.agents) == truncated[part].any()
            if not book.agents:
                ended += 1
                np.testing.assert_array_equal(np.stack(infos["final_obs"][part]), list(final.values()))
                assert infos["final_info"]["length"][part].tolist() == [book.clock] * 6
                final = book.reset()[0]
            np.testing.assert_array_equal(obs[part], list(final.values()))
    assert ended >= 4 and reward.dtype == np.float64 and not terminated.any()


@pytest.mark.parametrize("game", ["arena, easy", "navigation"])
def test_scripted_play_beats_random_play(game: str) -> None:
    by_chance, by_script = random_hearts(ARENAS[game], 48), scripted_hearts(ARENAS[game], 4)
    assert by_script > 10 and by_script > 8 * by_chance


def test_renderings() -> None:
    arena = empty(agents=2)
    arena.render_mode = "ansi"
    put(arena, "mine_red", 9, 10, ore_red=3)
    put(arena, "block", 9, 11)
    arena.bodies[1].timer = 4
    arena.bodies[0].inventory[HEART] = 2
    text = arena.render()
    assert "M3[]" in text and "▲0*1" in text and "0: 2 heart" in text and "1: nothing" in text
    arena.render_mode = "rgb_array"
    frame = arena.render()
    assert frame.dtype == np.uint8 and frame.shape == (17 * 20, 17 * 20 + 9 * 20, 3)
    arena.bodies[0].inventory[HEART] = 0
    changed = (arena.render() != frame).any(2)
    assert changed[:, : 17 * 20].any() and changed[:, 17 * 20 :].any()  # under the agent and in the list
    act(arena, ROTATE + RIGHT)
    assert (arena.render() != frame).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_plays_the_same_games_and_a_graph_captures_a_step() -> None:
    cpu, gpu = MettaBatch(8, "cpu", 1, **BATTLE), MettaBatch(8, "cuda", 1, **BATTLE)
    assert torch.equal(cpu.reset(), gpu.reset().cpu())
    rng = np.random.default_rng(0)
    action = torch.zeros(cpu.num_agents, dtype=torch.int64, device="cuda")
    graph = None
    for step in range(300):
        chosen = torch.as_tensor(rng.integers(25, size=cpu.num_agents))
        action.copy_(chosen)
        if step == 150:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = gpu.step(action)
        if graph is None:
            results = gpu.step(action)
        else:
            graph.replay()
        for ours, theirs in zip(cpu.step(chosen)[:4], results[:4]):
            assert torch.equal(ours, theirs.cpu())
