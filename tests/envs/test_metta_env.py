"""The MettaGrid rule book rule by rule, and the batched version against it."""

import re
import shutil
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import envs  # noqa: F401  registers the ids
from benchmarks.players import metta_action
from envs.metta.arena import MettaArena, Thing
from envs.metta.batch import MettaBatch
from envs.metta.rules import (
    ACTIONS,
    ARMOR,
    BACK,
    BUSY,
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
SETTINGS = {
    "arena": dict(max_steps=60, lanes=5, steps=250),
    "four arenas, easy": dict(max_steps=60, lanes=2, steps=100, instances=4, easy=True, rewards="shaped"),
    "navigation": dict(VARIANTS["MettaNavigation-v0"], max_steps=60, lanes=4, steps=150),
    "memory": dict(VARIANTS["MettaMemory-v0"], max_steps=60, lanes=4, steps=150),
    "battle": dict(BATTLE, lanes=4, steps=300),
    "battle of three": dict(BATTLE, lanes=2, steps=150, instances=3),
    "work": dict(BATTLE, lanes=2, steps=150, rewards="work"),
    "ends at once": dict(BATTLE, agents=2, max_steps=3, lanes=25, steps=30),
    "crowd": dict(size=9, agents=30, objects={"block": 34, "mine_red": (0, 6)}, max_steps=50, lanes=2, steps=60),
}


@pytest.fixture(autouse=True)
def one_thread():
    """What is this small is faster so, and does not slow down when something else is running."""
    torch.set_num_threads(1)


def mixed_action(arena: MettaArena, body: Thing, rng: np.random.Generator) -> int:
    """Useful things mostly, attacks where there is a laser, anything at times: every rule gets its turn."""
    draw = rng.random()
    if draw < 0.25:
        return int(rng.integers(25))
    cells = [arena._cell(body, *reach) for reach in REACH]
    targets = [n for n, (row, column) in enumerate(cells, 1) if arena.grid[row][column] in arena.bodies]
    if draw < 0.8 and body.inventory[LASER] and targets:
        return int(rng.choice([NEAREST, *targets]))
    row, column = arena._cell(body, 1)
    thing = arena.grid[row][column]
    if thing and thing.name in arena.rules.book and draw < 0.7:
        return GET if draw < 0.6 else PUT
    if thing and draw < 0.7:
        return SWAP
    return metta_action(arena, body) if draw < 0.8 else int(rng.choice([FORWARD, ROTATE + rng.integers(4)]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "battle" in name else []) for name in SETTINGS]
)
def test_batch_plays_by_the_rule_book(name: str) -> None:
    """Tokens, rewards, ends and statistics; also along the path of CUDA, and in games that were loaded."""
    rules = dict(SETTINGS[name])
    lanes, steps = rules.pop("lanes"), rules.pop("steps")
    episodes, stats = play_both(rules, lanes, steps, paths=(False, True))
    assert episodes >= lanes
    if "battle" in name:
        needed = "laser.lost armor.lost attack.win attack.loss attack.blocked frozen_ticks heart.get ore_red.stolen"
        assert not [key for key in needed.split() if not stats[key]]
    if name == "crowd":
        assert stats["tokens_dropped"] > 0


@pytest.mark.slow
def test_batch_plays_ten_whole_episodes_by_the_rule_book() -> None:
    assert play_both(VARIANTS["MettaNavigation-v0"], lanes=5, steps=2000, paths=(False,))[0] >= 10


def play_both(rules: dict, lanes: int, steps: int, paths: tuple[bool, ...]) -> tuple[int, dict[str, int]]:
    """Same actions for the rule book and a batch of each kind, everything compared after each step.

    Returns how many episodes ended and the sums of their statistics.
    """

    def start(seed: int) -> list[MettaBatch]:
        batches = [MettaBatch(lanes, seed=seed, **rules) for _ in paths]
        for batch, batch.fixed_shapes in zip(batches, paths):
            batch.reset()
        return batches

    books, batches = [MettaArena(lane=lane, **rules) for lane in range(lanes)], start(5)
    agents, rng, episodes = batches[0].rules.num_agents, np.random.default_rng(0), 0
    total = np.zeros(len(STATS), int)

    def stacked(of: list[dict]) -> np.ndarray:
        return np.stack([value for one in of for value in one.values()])

    obs_after = [book.reset(seed=5)[0] for book in books]
    for batch in batches:
        np.testing.assert_array_equal(stacked(obs_after), batch.obs)
    for _ in range(steps):
        last = books[-1]
        if last.episode == 0 and last.clock == last.limit - 1:  # what is loaded needs the next map of `last` at once
            states = [batch.state_dict() for batch in batches]
            batches = start(8)
            for batch, state in zip(batches, reversed(states)):
                batch.load_state_dict(state)
                np.testing.assert_array_equal(stacked(obs_after), batch.obs)
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


@pytest.mark.slow
def test_a_step_with_fixed_shapes_is_one_graph() -> None:
    torch._dynamo.reset()
    batch = MettaBatch(2, **BATTLE)
    batch.fixed_shapes = True
    batch.reset()
    step = torch.compile(batch.step, fullgraph=True, backend="eager")
    step(torch.zeros(batch.num_agents, dtype=torch.int64))


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.slow
def test_a_compiled_step_is_few_launches_and_plays_the_same(monkeypatch) -> None:
    """A tenth of the 1,914 that an eager step once was, by the kernels that inductor writes for it on a CPU."""
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")  # not optimised, which takes g++ three times as long
    plain, compiled = (MettaBatch(65, seed=1, **dict(BATTLE, max_steps=25)) for _ in range(2))
    for batch in (plain, compiled):
        batch.fixed_shapes = True
        batch.reset()
        batch.inventory[batch.agent_row, LASER] = 20
        batch.inventory[batch.agent_row[::2], ARMOR] = 2
    action = torch.zeros(plain.num_agents, dtype=torch.int64)
    plain.step(action)
    torch._dynamo.reset()
    step = torch.compile(compiled.step, fullgraph=True)
    # Sums into rows that are named by a tensor are kernels on CUDA too.
    options = {"force_disable_caches": True, "cpp.fallback_scatter_reduce_sum": False}
    with inductor_config.patch(options):
        _, (code,) = run_and_get_code(step, action)
    calls = len(re.findall(r"= (?:torch\.ops\.|aten\.|extern_kernels\.)", code))
    loops = len(re.findall(r"for\(int64_t x0=", code))
    assert loops + calls <= 191
    rng = np.random.default_rng(0)
    most = torch.zeros(len(STATS), dtype=torch.int32)
    for _ in range(30):
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


# The rules, one by one, in an arena with nothing in it but what is put there.


def empty(agents: int = 1, **rules) -> MettaArena:
    """Agents side by side from row 10, column 10 on, all facing up."""
    arena = MettaArena(size=15, agents=agents, random_first_length=False, **({"objects": {}} | rules))
    arena.reset(seed=0)
    for body in arena.bodies:
        arena.grid[body.row][body.column] = None
    for i, body in enumerate(arena.bodies):
        arena.grid[10][10 + i] = body
        body.row, body.column = 10, 10 + i
    return arena


def move(arena: MettaArena, body: Thing, row: int, column: int) -> None:
    arena.grid[body.row][body.column] = None
    arena.grid[row][column] = body
    body.row, body.column = row, column


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
    mine, body = put(arena, "mine_red", 9, 10), arena.bodies[0]
    stock = []
    for _ in range(400):
        act(arena)
        stock.append(mine.inventory[ORE])
    grown = [tick + 1 for tick in range(1, 400) if stock[tick] > stock[tick - 1]]
    assert stock[0] == 1 and grown == [52, 103, 154, 205] and stock[-1] == 5 and mine.timer == 0
    body.inventory[ORE] = 47
    obs, _ = act(arena, GET)
    assert body.inventory[ORE] == 50 and mine.inventory[ORE] == 2 and mine.timer == 51
    assert features(obs[0], CENTRE - 16)[BUSY] == 1
    act(arena, GET)
    assert mine.inventory[ORE] == 3 and arena.stats[0]["failed"] == 1 and arena.rules.capacity[HEART] == 255


def test_a_converter_takes_one_recipe_a_put_and_starts_by_itself() -> None:
    arena = empty(rewards="shaped")
    altar, body = put(arena, "altar", 9, 10), arena.bodies[0]
    body.inventory[BATTERY] = 5
    act(arena, PUT)
    assert (body.inventory[BATTERY], altar.inventory[BATTERY], altar.timer) == (2, 0, 11)
    act(arena, PUT)  # two more, not enough for a heart; the first is done
    assert (body.inventory[BATTERY], altar.inventory[BATTERY], altar.inventory[HEART]) == (0, 2, 1)
    assert act(arena, GET)[1] == [1.0] and body.inventory[HEART] == 1
    for altar.timer in (2, 1):
        altar.inventory[BATTERY] = 3
        act(arena)
    assert altar.timer == 11 and altar.inventory[BATTERY] == 0  # the next begins as soon as it has cooled


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


def test_work_is_rewarded_whoever_has_the_heart() -> None:
    arena = empty(rewards="work", easy=True)
    generator, body = put(arena, "generator_red", 9, 10), arena.bodies[0]
    body.inventory[ORE] = 4
    # The first begins at once, the second is next, two more wait, and nothing is left to put.
    assert [act(arena, PUT)[1][0] for _ in range(5)] == [1.1, 1.1, 0.55, 0.36, 0.0]
    assert generator.inventory[ORE] == 3
    assert act(arena, GET)[1] == [0.1] and body.inventory[BATTERY] == 1
    arena.grid[9][10] = None
    put(arena, "altar", 9, 10, heart=3)
    obs, rewards = act(arena, GET)  # three hearts at once
    assert rewards == [0.3] and features(obs[0])[11] == 30
    assert act(arena, PUT)[1] == [1.1] and arena.stats[0]["hundredths"] == 110 + 110 + 55 + 36 + 10 + 30 + 110
    arena.grid[9][10] = None
    put(arena, "mine_red", 9, 10, ore_red=4)  # and one more is dug in this step
    assert act(arena, GET)[1] == [0.5]


def test_moving_turning_and_swapping() -> None:
    arena = empty()
    body = arena.bodies[0]
    act(arena, FORWARD), act(arena, BACK), act(arena, BACK)
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


def test_a_laser_freezes_and_robs_and_armor_stops_it() -> None:
    arena = empty(agents=2)
    shooter, target = arena.bodies
    move(arena, target, 8, 11)  # two ahead and one to the right: attack 4
    act(arena, 4)
    assert arena.stats[0]["failed"] == 1  # nothing to shoot with
    shooter.inventory[LASER], shooter.inventory[HEART] = 6, 254
    target.inventory[HEART], target.inventory[ORE], target.inventory[ARMOR] = 3, 7, 1
    act(arena, 4)
    assert target.inventory[ARMOR] == 0 and target.timer == 0 and target.inventory[ORE] == 7
    act(arena, 5)  # straight ahead there is nobody, and the laser is gone
    act(arena, 0)  # always fails
    assert shooter.inventory[LASER] == 4 and target.timer == 0
    obs, rewards = act(arena, 4)
    assert shooter.inventory[ORE] == 7 and shooter.inventory[HEART] == 255 and target.inventory[HEART] == 2
    assert target.timer == 9 and rewards == [1.0, -1.0]  # it lost its first turn in the same step
    assert features(obs[1])[FROZEN] == 1
    target.inventory[ORE] = 1
    act(arena, NEAREST)
    assert target.timer == 9 and shooter.inventory[ORE] == 7  # frozen again, but robbed only once
    for _ in range(10):
        assert target.row == 8
        act(arena, NOOP, FORWARD)
    assert target.row == 7 and arena.stats[1]["frozen_ticks"] == 11


def test_where_attacks_land() -> None:
    ahead = ((-1, 0), (1, 0), (0, -1), (0, 1))
    right = ((0, 1), (0, -1), (-1, 0), (1, 0))
    for heading, n in np.ndindex(4, 9):
        arena = empty(agents=2)
        shooter, target = arena.bodies
        shooter.heading, shooter.inventory[LASER] = heading, 1
        place = np.array([10, 10]) + (1 + n // 3) * np.array(ahead[heading]) + (1 - n % 3) * np.array(right[heading])
        move(arena, target, *place)
        act(arena, 1 + n)
        assert target.timer == 9


def test_the_nearest_attack_prefers_near_and_middle() -> None:
    arena = empty(agents=4)
    for body, (row, column) in zip(arena.bodies[1:], [(9, 11), (8, 10), (9, 9)]):
        move(arena, body, row, column)
    arena.bodies[0].inventory[LASER] = 3
    act(arena, NEAREST)
    assert [body.timer for body in arena.bodies] == [0, 9, 0, 0]
    arena.grid[9][11] = None
    act(arena, NEAREST)
    assert [body.timer for body in arena.bodies[2:]] == [0, 9]


def test_attacks_come_first_the_rest_in_random_order() -> None:
    winners = set()
    for seed in range(20):
        arena = empty(agents=2)
        arena.episode_key += seed * 999
        left, right = arena.bodies
        left.heading, right.heading, left.inventory[LASER] = RIGHT, LEFT, 1
        move(arena, right, 10, 12)
        act(arena, FORWARD, FORWARD)  # both step on the cell between them
        winners.add(left.column)
        act(arena, NEAREST, BACK)  # the target flees, but the shot comes first
        assert right.timer == 9
    assert winners == {10, 11}


def test_episodes_are_cut_and_only_the_first_at_random() -> None:
    arena, lengths = MettaArena(max_steps=40), []
    arena.reset(seed=6)
    for _ in range(120):
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
    put(arena, "mine_red", 9, 9, ore_red=2)
    obs, _ = act(arena, PAINT + 2)
    first = obs[0]
    assert first[:4].tolist() == [[CENTRE, 8, 0], [CENTRE, 9, 2], [CENTRE, 10, 2], [CENTRE, 11, 0]]
    obs, _ = act(arena, PAINT)
    first = obs[0]
    assert first[0].tolist() == [CENTRE, 8, 1] and first.dtype == np.uint8 and first.shape == (TOKENS, 3)
    assert first[4:9].tolist() == [[CENTRE, 0, 0], [CENTRE, 1, 0], [CENTRE, 3, 0], [CENTRE, 4, 0], [CENTRE, 5, 1]]
    at_mine, at_block, at_wall = CENTRE - 17, CENTRE - 48, CENTRE - 5
    assert first[9:14, 0].tolist() == [CENTRE + 1] * 5  # the other agent
    assert first[14:18].tolist() == [[at_mine, 0, 2], [at_mine, 5, 0], [at_mine, BUSY, 1], [at_mine, FIRST_ITEM, 3]]
    assert first[18:21].tolist() == [[at_block, 0, 14], [at_block, 7, 1], [at_wall, 0, 1]]
    assert (first[first[:, 0] != 255][21:, 1] == 0).all()  # the outer wall, farther away
    distance = [abs(place // 16 - VIEW) + abs(place % 16 - VIEW) for place in first[first[:, 0] != 255, 0].tolist()]
    assert distance == sorted(distance) and (first[len(distance) :] == 255).all()


def test_presets_hold_what_they_should() -> None:
    arena = MettaArena(**VARIANTS["MettaArena-v0"])
    arena.reset(seed=1)
    names = [thing.name for row in arena.grid for thing in row if thing]
    assert arena.rules.shape == (35, 35) and names.count("agent") == 6 and names.count("wall") == 35**2 - 25**2 + 20
    kinds = "mine_red generator_red altar lasery armory block"
    assert [names.count(name) for name in kinds.split()] == [10, 5, 5, 1, 1, 20]
    assert Rules(instances=4).shape == (60, 60) and Rules(instances=4).num_agents == 24
    navigation = MettaArena(**VARIANTS["MettaNavigation-v0"])
    counts = []
    for seed in range(40):
        navigation.reset(seed=seed)
        counts.append(len(navigation.converters))
        assert all(altar.inventory[HEART] == 1 for altar in navigation.converters)
    assert 40 <= min(counts) < 90 and 150 < max(counts) <= 200


def test_what_is_to_be_remembered_is_out_of_sight() -> None:
    arena = MettaArena(**VARIANTS["MettaMemory-v0"])
    ends = set()
    for seed in range(20):
        obs, _ = arena.reset(seed=seed)
        altars = arena.converters[2::3]
        ends |= {(altar.row - body.row, altar.column - body.column) for altar, body in zip(altars, arena.bodies)}
        for position, feature, value in (seen[seen[:, 0] != 255].T for seen in obs.values()):
            assert set(value[feature == 0]) == {0, 1, 2}  # an agent, walls and a mine
            assert set(position) <= {CENTRE + 16 * row + column for row in (-1, 0, 1) for column in (-1, 0, 1)}
    assert ends == {(-4, -3), (-4, 3), (4, -3), (4, 3)} and arena.rules.capacity[ORE] == 1


def test_terrain_cuts_nothing_off() -> None:
    shares = []
    for seed in range(30):
        arena = MettaArena(agents=1, terrain=True, objects={}, size=15 + seed % 2)
        arena.reset(seed=seed)
        start = arena.bodies[0]
        reached, queue = set(), [(start.row, start.column)]
        while queue:
            row, column = cell = queue.pop()
            if cell not in reached and arena.grid[row][column] in (None, start):
                reached.add(cell)
                queue += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        assert len(reached) == 1 + sum(row.count(None) for row in arena.grid)
        shares.append(len(reached) / arena.rules.size**2)
    assert min(shares) < 0.7 and max(shares) > 0.95


@pytest.mark.parametrize(
    "rules, names",
    [(dict(size=8), "size 8 .* 68: size 9"), (dict(size=5, objects={"wall": 9999}), "size 60|no size"),
     (dict(instances=5), "instances 5"), (dict(size=4), "size 4"), (dict(agents=0), "agents 0"),
     (dict(rewards="gold"), "gold"), (dict(max_steps=0), "max_steps 0"), (dict(objects={"bank": 1}), "bank"),
     (dict(objects={"altar": (5, 2)}), "altar"), (dict(freeze=0), "freeze 0"),
     (dict(size=40, agents=254, objects={}), "254"), (dict(size=25, terrain=True, objects={"altar": 400}), "size"),
     (VARIANTS["MettaMemory-v0"] | {"size": 12}, "size 12"), (VARIANTS["MettaMemory-v0"] | {"agents": 2}, "agents 2"),
     (dict(plan="a", objects={"altar": 1, "armory": 1}), "armory"), (dict(view=6), "view 6"), (dict(carry=0), "carry")],
)  # fmt: skip
def test_rules_nobody_can_play_by_are_refused(rules: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Rules(**rules)


def test_pettingzoo_finds_nothing_to_complain_about() -> None:
    test = pytest.importorskip("pettingzoo.test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test.parallel_api_test(MettaArena(max_steps=50), num_cycles=60)
        test.parallel_seed_test(lambda: MettaArena(max_steps=20), num_cycles=30)


def test_spaces_are_the_same_objects_at_each_call_one_an_agent() -> None:
    arena = MettaArena()
    for space in (arena.action_space, arena.observation_space):
        assert all(space(agent) is space(agent) for agent in arena.possible_agents)
    assert len({id(arena.action_space(agent)) for agent in arena.possible_agents}) == 6


def test_vector_env_is_numpy_with_agents_as_lanes() -> None:
    with pytest.raises(ValueError, match="multiple of 6"):
        gym.make_vec("MettaArena-v0", num_envs=8)
    vector = gym.make_vec("MettaArena-v0", num_envs=12, max_steps=15)
    batch, rng, ends = MettaBatch(2, seed=7, max_steps=15), np.random.default_rng(0), 0
    obs, _ = vector.reset(seed=7)
    np.testing.assert_array_equal(obs, batch.reset())
    assert vector.observation_space.contains(obs)
    for _ in range(40):
        action = rng.integers(25, size=12)
        *ours, infos = vector.step(action)
        *theirs, info = batch.step(torch.as_tensor(action))
        for our, their in zip(ours, theirs):
            np.testing.assert_array_equal(our, their)
        done = ours[3]
        if done.any():
            ends += done.sum()
            np.testing.assert_array_equal(np.stack(infos["final_obs"][done]), info["final_obs"][done])
            np.testing.assert_array_equal(infos["final_info"]["length"][done], info["length"][done])
    assert ends >= 24 and ours[1].dtype == np.float64


def test_renderings() -> None:
    arena = empty(agents=2)
    arena.render_mode = "ansi"
    put(arena, "mine_red", 9, 10, ore_red=3), put(arena, "block", 9, 11)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_plays_the_same_games_and_a_graph_captures_a_step() -> None:
    cpu, gpu = MettaBatch(8, "cpu", 1, **BATTLE), MettaBatch(8, "cuda", 1, **BATTLE)
    assert torch.equal(cpu.reset(), gpu.reset().cpu())
    rng = np.random.default_rng(0)
    action = torch.zeros(cpu.num_agents, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for step in range(300):
        chosen = torch.as_tensor(rng.integers(25, size=cpu.num_agents))
        action.copy_(chosen)
        if step < 150:
            results = gpu.step(action)
        if step == 150:
            with torch.cuda.graph(graph):
                results = gpu.step(action)
        if step >= 150:
            graph.replay()
        for ours, theirs in zip(cpu.step(chosen)[:4], results[:4]):
            assert torch.equal(ours, theirs.cpu())
