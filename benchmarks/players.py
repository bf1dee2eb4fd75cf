"""Baseline players: random actions, and scripted players for the arena and Mario."""

import random
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import torch

import ppo_metta
from benchmarks.metta_parts import metta_args, metta_envs
from envs.mario import game as mario
from envs.mario import levels as mario_levels
from envs.mario.batch import MarioBatch
from envs.mario.game import UNSEEN_LEVELS, MarioGame
from envs.mario.real import SuperMarioBrosBatch
from envs.metta.arena import MettaArena, Thing
from envs.metta.rules import FORWARD, GET, ITEMS, MOVES, NOOP, PUT, ROTATE, Rules


def metta_errands(arena: MettaArena, body: Thing) -> dict[Thing, int]:
    """Converters this agent can use now, and the action there: GET an output or PUT inputs."""
    errands = {}
    for converter in arena.converters:
        recipe = arena.rules.book[converter.name]
        if not set(recipe.outputs) & {"heart", "battery_red", "ore_red"}:
            continue
        carried = body.inventory
        stock = converter.inventory
        outputs = [ITEMS.index(item) for item in recipe.outputs]
        inputs = {ITEMS.index(item): number for item, number in recipe.inputs.items()}
        can_put = bool(inputs)
        for item, number in inputs.items():
            if carried[item] < number or stock[item] >= 2 * number:
                can_put = False
        if can_put:
            errands[converter] = PUT
        for item in outputs:
            if stock[item] and carried[item] < arena.rules.capacity[item]:
                errands[converter] = GET
    return errands


def metta_action(arena: MettaArena, body: Thing) -> int:
    """Next action on the shortest path to the nearest errand; random without one."""
    errands = metta_errands(arena, body)
    start = body.row, body.column
    queue = deque([start])
    first_steps = {start: None}  # first direction of the path to each cell
    while queue:
        row, column = queue.popleft()
        first_step = first_steps[row, column]
        for direction, (down, across) in enumerate(MOVES):
            cell = row + down, column + across
            thing = arena.grid[cell[0]][cell[1]]
            if thing in errands:
                action = FORWARD
                if first_step is None:  # the thing is next to the agent
                    action = errands[thing]
                    first_step = direction
                if body.heading != first_step:
                    return ROTATE + first_step
                return action
            if thing is None and cell not in first_steps:
                first_steps[cell] = first_step
                if first_step is None:
                    first_steps[cell] = direction
                queue.append(cell)
    return random.choice([NOOP, FORWARD, *range(ROTATE, ROTATE + 4)])


ARENA_STEPS = ["moves", "turns", "gets or puts an item", "has no effect"]


def arena_games(flags: str, games: int, run: str | None = None) -> dict:
    """Games on the rule book, by the scripted player or by the agents that `run`, a folder of ppo_metta.py, trained.

    "hearts": mean per agent and episode. "tenths": the same in each tenth of an episode. "steps": share of the agents'
    steps by what a step does, of ARENA_STEPS. Of the first game, "places": agents' steps in each cell (rows, columns),
    and "things": name, row and column of all that stands on the map at the end.
    """
    cpu = torch.device("cpu")
    arena = MettaArena(random_first_length=False, **ppo_metta.rules_of(metta_args(flags, "cpu")))
    if run is not None:
        _, checkpoint = ppo_metta.load_checkpoint(ppo_metta.Args(evaluate=run))
        args = ppo_metta.Args(**checkpoint["args"])
        agent = ppo_metta.Agent(args, ppo_metta.make_games(args, 1, cpu, 0), cpu)
        agent.load_state_dict(checkpoint["agent"])
    tenths = [0] * 10
    steps = Counter()
    places = np.zeros(arena.rules.shape, int)
    things = []
    random.seed(0)
    for seed in range(games):
        obs, _ = arena.reset(seed=seed)
        if run is not None:
            act = ppo_metta.make_player(agent, len(arena.agents), cpu)
        while arena.agents:
            if run is None:
                actions = [metta_action(arena, body) for body in arena.bodies]
            else:
                actions = act(torch.from_numpy(np.stack([*obs.values()]))).tolist()
            tenth = 10 * arena.clock // arena.limit
            bodies_before = [replace(body) for body in arena.bodies]
            stats_before = [stats.copy() for stats in arena.stats]
            obs, *_ = arena.step(dict(zip(arena.agents, actions)))
            for action, body, old_body, stats, old_stats in zip(
                actions, arena.bodies, bodies_before, arena.stats, stats_before
            ):
                tenths[tenth] += stats["heart.get"] - old_stats["heart.get"]
                step = "has no effect"
                if body.row != old_body.row or body.column != old_body.column:
                    step = "moves"
                elif body.heading != old_body.heading:
                    step = "turns"
                elif action in (GET, PUT) and stats["success"] > old_stats["success"]:
                    step = "gets or puts an item"
                steps[step] += 1
                if seed == 0:
                    places[body.row, body.column] += 1
        if seed == 0:
            things = [(thing.name, thing.row, thing.column) for row in arena.grid for thing in row if thing]
    episodes = games * arena.rules.num_agents
    return {
        "hearts": sum(tenths) / episodes,
        "tenths": [hearts / episodes for hearts in tenths],
        "steps": {step: steps[step] / steps.total() for step in ARENA_STEPS},
        "places": places.tolist(),
        "things": things,
    }


def scripted_hearts(flags: str, agent_episodes: int) -> float:
    """Mean hearts per agent and episode of the scripted player, over whole games."""
    num_agents = Rules(**ppo_metta.rules_of(metta_args(flags, "cpu"))).num_agents
    return arena_games(flags, -(-agent_episodes // num_agents))["hearts"]


def random_hearts(flags: str, agent_episodes: int) -> float:
    """Mean hearts per agent and episode of random actions, on the batched arena."""
    args = metta_args(flags, "cpu")
    cpu = torch.device("cpu")
    num_agents = len(metta_envs(args, 1, cpu, 0).obs)
    envs = metta_envs(args, -(-agent_episodes // num_agents), cpu, 0, evaluation=True)
    torch.manual_seed(0)
    for _ in range(envs.max_steps):
        action = torch.randint(envs.num_actions, (len(envs.obs),))
        *_, info = envs.step(action)
    return info["hearts"].float().mean().item()


def mario_jumper(game: MarioGame) -> int:
    """Run; jump before gaps, walls and walkers, as high as possible; brake before landing on a walker."""
    front = game.x + mario.WIDTH
    feet = (game.y + mario.HEIGHT - 1) >> 8

    def block(tiles: float, row: int) -> int:
        """Block so many tiles ahead."""
        column = (front + int(256 * tiles)) >> 8
        return game.level.grid[column << 4 | row]

    walkers = [x - game.x for x in game.visible() if x > game.x]
    if not game.grounded:
        falling_fast = game.vy > 0 and game.vx > 8
        if falling_fast and any(160 < distance < 900 for distance in walkers):
            return 6
        if game.held and game.vy < 0:
            return 4
        return 3
    danger = False
    for tiles in (0, 0.5):
        if block(tiles, mario_levels.GROUND) == mario_levels.ABYSS:
            danger = True
    for tiles in (0, 1, 2):
        if block(tiles, feet) >= mario_levels.SOLID:
            danger = True
    on_ground = feet == mario_levels.GROUND - 1
    if on_ground and any(distance < 660 for distance in walkers):
        danger = True
    if danger and not game.held:
        return 4
    return 3


MARIO_PLAYERS = {  # game to action, of the seven simple actions
    "random": lambda game: random.randrange(7),
    "right and run": lambda game: 3,
    "a scripted jumper": mario_jumper,
}


def mario_games(player: str, games: int, real: bool = False, difficulty: int = 0) -> list[float]:
    """Flag rate and mean distance in pixels over at least `games` games on unseen levels, or on the real 1-1."""
    random.seed(1)
    if real:
        batch = SuperMarioBrosBatch(seed=1)
    else:
        batch = MarioBatch(10, seed=1, levels=UNSEEN_LEVELS, difficulty=difficulty)
    batch.reset()
    while batch.finished[0] < games:
        batch.step(np.array([MARIO_PLAYERS[player](game) for game in batch.games]))
    finished, distance, flags = batch.finished[:3].tolist()
    return [flags / finished, distance / finished]
