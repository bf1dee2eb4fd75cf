"""Stable-Baselines3's agents as peers in Snake, the arena and Mario."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F

import dqn_mario_async
import dqn_snake
import ppo_metta
from benchmarks import harness
from benchmarks.harness import Options, measure_rate
from benchmarks.metta_parts import RuleBooks, metta_args, metta_envs, metta_network, rollout_sizes
from envs.mario import game as mario
from envs.mario.batch import MarioEnv
from envs.metta.view import TokenView
from envs.snake.batch import SnakeBatch
from envs.snake.rules import MOVES
from envs.snake.view import EgocentricView

FOREVER = 10**9  # steps; runs end by time


def learning_curve(
    make_model: Callable[[], Any], evaluate: Callable[[Any], float], seconds: float, every: float, goal: float
) -> list:
    """[seconds, score] of an SB3 agent until it reaches `goal`. Evaluation stops the clock.

    The next evaluation is due after `every` seconds or a twentieth of the training time so far, whichever is longer.
    """
    model = make_model()
    curve = [[0.0, 0.0]]
    start = time.perf_counter()
    paused = 0.0

    def keep_training(*_: Any) -> bool:
        nonlocal paused
        now = time.perf_counter() - start - paused
        if now >= curve[-1][0] + max(every, now / 20):
            curve.append([now, evaluate(model)])
            paused = time.perf_counter() - start - now
        return now < seconds and curve[-1][1] < goal

    model.learn(FOREVER, callback=keep_training)
    return curve


def learn_for(model: Any, seconds: float) -> dict[str, float]:
    """Env steps per second of training."""
    start = time.perf_counter()
    model.learn(FOREVER, callback=lambda *_: time.perf_counter() - start < seconds)
    return {"env_steps_per_second": model.num_timesteps / (time.perf_counter() - start)}


def plan_agents(
    agents: Iterable[str],
    explored: dict[str, int],
    longest: int,
    rate: Callable,
    seconds: int,
    options: Options,
    device: torch.device,
) -> tuple[dict, dict]:
    """Settings of SB3 agents, with the faster number of threads by `rate`, and the seconds after which each stops.

    The limit is `longest` at SB3's defaults, ten minutes with our settings. A DQN explores over a tenth of the steps of
    that time, or of the time in `explored` if its name contains the key.
    """
    plans = {}
    ends = {}
    for name in agents:
        at_defaults = "defaults" in name
        trials = {torch.get_num_threads()}
        if not at_defaults:
            trials.add(1)
        rates = {}
        for threads in trials:
            found = harness.in_subprocess(rate, seconds=seconds, name=name, device=device.type, threads=threads)
            rates[threads] = found["env_steps_per_second"]
        threads = max(rates, key=rates.get)
        ends[name] = longest if at_defaults else 600
        if options.fast:
            ends[name] = 20
        horizon = ends[name]
        for part, most in explored.items():
            if part in name:
                horizon = min(most, ends[name])
        plans[name] = {"name": name, "threads": threads, "explored": int(0.1 * horizon * rates[threads])}
    return plans, ends


# ------------------------------------------------------------------------------------------------ Snake

SNAKE_RECIPE = {  # of dqn_snake.py, as far as SB3 supports it: no double DQN, no learning rate schedule
    "view": True,
    "width": 256,
    "num_envs": 128,
    "gamma": 0.98,
    "learning_rate": 1e-3,
    "buffer_size": 500_000,
    "learning_starts": 5000,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": 1,
    "tau": 0.01,
    "target_update_interval": 128,
    "exploration_final_eps": 0.002,
}
SNAKE_AGENTS = {
    "SB3's DQN, defaults": {"algorithm": "DQN"},
    "SB3's DQN, our view and gamma": {"algorithm": "DQN", "view": True, "gamma": 0.98},
    "SB3's DQN, our recipe": {"algorithm": "DQN", **SNAKE_RECIPE},
    "SB3's PPO, defaults": {"algorithm": "PPO"},
    "SB3's PPO, our view and gamma": {"algorithm": "PPO", "view": True, "gamma": 0.98},
}


class RelativeActions(gymnasium.ActionWrapper):
    """Actions left, ahead, right, for agents with the egocentric view."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_space = gymnasium.spaces.Discrete(3)

    def action(self, action: int) -> int:
        env = self.unwrapped
        columns = env.rules.board[1]
        head_row, head_column = divmod(env.body[-1], columns)
        food_row, food_column = divmod(env.food, columns)
        right_row, right_column = MOVES[(env.heading + 1) % 4]
        steps_right = (food_row - head_row) * right_row + (food_column - head_column) * right_column
        turn = int(action) - 1
        if steps_right < 0:  # the view is mirrored
            turn = -turn
        return (env.heading + turn) % 4


def absolute_actions(view: EgocentricView, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Relative to absolute actions, batched."""
    _, orientation, _, _, _ = view.locate(obs)
    turn = action - 1
    turn = torch.where(orientation % 2 == 1, -turn, turn)
    return (orientation // 2 + turn) % 4


class SnakeView(torch.nn.Module):
    """Features extractor for SB3: dqn_snake.py's view, flat, or the hidden layers of its network.

    As in dqn_snake.py the view is computed per batch, so the replay buffer holds bytes.
    """

    def __init__(self, space: gymnasium.spaces.Box, width: int, device: str) -> None:
        super().__init__()
        self.view = EgocentricView(space.shape, torch.device(device))
        self.trunk = dqn_snake.MLP(self.view, width).to(device) if width else None
        self.features_dim = width or 3 * self.view.num_features + self.view.side**2

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        _, features, food_position = self.view.features(obs.byte())
        if self.trunk:
            return self.trunk(features, food_position)
        return torch.cat([features.flatten(1), F.one_hot(food_position, self.view.side**2)], 1)


def sb3_agent(
    name: str, device: str, threads: int, env_id: str = "Snake-v0", seed: int = 1, explored: int = 1, **changes: Any
) -> Any:
    """An agent of SNAKE_AGENTS; a DQN explores over its first `explored` steps of FOREVER."""
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    import envs  # noqa: F401  (registers the games)

    torch.set_num_threads(threads)
    settings = {"view": False, "width": 0, "num_envs": 1} | SNAKE_AGENTS[name]
    if settings["algorithm"] == "DQN":
        settings["exploration_fraction"] = explored / FOREVER
    settings |= changes
    algorithm = getattr(stable_baselines3, settings.pop("algorithm"))
    view = settings.pop("view")
    width = settings.pop("width")
    if view:
        policy = {
            "features_extractor_class": SnakeView,
            "features_extractor_kwargs": {"width": width, "device": device},
        }
        if width:
            policy["net_arch"] = []
        settings["policy_kwargs"] = policy | settings.pop("policy", {})

    def make_env() -> gymnasium.Env:
        env = gymnasium.make(env_id, disable_env_checker=True)
        return RelativeActions(env) if view else env

    games = DummyVecEnv([make_env] * settings.pop("num_envs"))
    return algorithm("MlpPolicy", games, device=device, seed=seed, **settings)


def sb3_rate(seconds: float, **agent: Any) -> dict[str, float]:
    """Env steps per second of training, and the replay ratio of a DQN."""
    model = sb3_agent(**agent)
    rate = learn_for(model, seconds)
    rate["replay_ratio"] = model._n_updates * model.batch_size / model.num_timesteps
    return rate


def sb3_act_rate(num_envs: int, seconds: float, device: str) -> float:
    """Env steps per second of dqn_snake.py's network in SB3's `DummyVecEnv`."""
    model = sb3_agent("SB3's DQN, our recipe", device, torch.get_num_threads(), num_envs=num_envs)
    games = model.get_env()
    obs = games.reset()

    def step() -> None:
        nonlocal obs
        obs = games.step(model.predict(obs, deterministic=True)[0])[0]

    return measure_rate(step, num_envs, seconds)


def greedy_score(model: Any, relative_actions: bool, episodes: int = 100) -> float:
    """Mean food over the greedy games of dqn_snake.py's evaluation."""
    envs = SnakeBatch(episodes, seed=dqn_snake.EVAL_SEED)
    obs = envs.reset()
    score = torch.zeros(episodes)
    done = torch.zeros(episodes, dtype=torch.bool)
    view = EgocentricView(envs.rules.board, envs.device)
    while not done.all():
        action = torch.as_tensor(model.predict(obs.numpy(), deterministic=True)[0])
        if relative_actions:
            action = absolute_actions(view, obs, action)
        obs, _, terminated, truncated, info = envs.step(action)
        ends = (terminated | truncated) & ~done
        score = torch.where(ends, info["score"].float(), score)
        done |= ends
    return score.mean().item()


def sb3_curve(name: str, seconds: float, every: float, goal: float, **agent: Any) -> list:
    """`learning_curve` of an agent of SNAKE_AGENTS: mean food."""
    relative_actions = "view" in SNAKE_AGENTS[name]

    def evaluate(model: Any) -> float:
        return greedy_score(model, relative_actions)

    return learning_curve(lambda: sb3_agent(name, **agent), evaluate, seconds, every, goal)


# ------------------------------------------------------------------------------------------------ the arena


class MettaView(torch.nn.Module):
    """Features extractor for SB3: ppo_metta.py's network up to its heads. SB3 passes tokens as floats."""

    def __init__(self, space: gymnasium.spaces.Box, flags: str, device: str) -> None:
        super().__init__()
        args = metta_args(flags, device)
        example = metta_envs(args, 1, torch.device("cpu"), 1)
        network = metta_network(args, example, torch.device(device))
        self.view = network.view
        self.encoder = network.encoder
        self.hidden = network.hidden
        self.features_dim = args.hidden_size

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        tokens = obs.byte()
        return torch.relu(self.hidden(self.encoder(tokens, self.view.heading(tokens))))


def arena_view(args: ppo_metta.Args, device: torch.device) -> TokenView:
    example = metta_envs(args, 1, torch.device("cpu"), 1)
    return TokenView(example.features, example.view_shape, device)


def sb3_arena_envs(args: ppo_metta.Args, rule_book: bool, device: torch.device, seen_actions: bool = False) -> Any:
    """The agents of a run's arenas as a VecEnv. `seen_actions`: actions are relative to the agent's heading, as for our
    network."""
    from stable_baselines3.common.vec_env import VecEnv

    view = arena_view(args, device)
    action_of_seen = view.seen_action.argsort(1)  # (4, actions), by heading

    class ArenaAgents(VecEnv):
        def __init__(self) -> None:
            self.seconds = 0.0  # spent in the games
            self.games = RuleBooks(args) if rule_book else metta_envs(args, args.num_envs, device, 1)
            num_agents, *shape = self.games.obs.shape
            space = gymnasium.spaces.Box(0, 255, tuple(shape), np.uint8)
            super().__init__(num_agents, space, gymnasium.spaces.Discrete(self.games.num_actions))

        def reset(self) -> np.ndarray:
            return self.games.obs.cpu().numpy().copy()

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = torch.as_tensor(actions, device=device)
            if seen_actions:
                heading = view.heading(self.games.obs.to(device))
                self.actions = action_of_seen[heading, self.actions]

        def step_wait(self):
            start = time.perf_counter()
            obs, reward, terminated, truncated, info = self.games.step(self.actions)
            self.seconds += time.perf_counter() - start
            infos = [{}] * self.num_envs  # shared, read-only
            for agent in truncated.nonzero().flatten().tolist():
                final_obs = info["final_obs"][agent].cpu().numpy()
                infos[agent] = {"terminal_observation": final_obs, "TimeLimit.truncated": True}
            reward = (args.reward_scale * reward).cpu().numpy()
            return obs.cpu().numpy().copy(), reward, (terminated | truncated).cpu().numpy(), infos

        def get_attr(self, name: str, indices: Any = None) -> list:
            return [None] * self.num_envs  # only asked for the render mode

        close = set_attr = env_method = env_is_wrapped = None  # abstract in VecEnv, not used by PPO

    return ArenaAgents()


def sb3_arena_agent(flags: str, games: Any, threads: int, device: str, seed: int = 1) -> Any:
    """SB3's PPO with the network, initialization, batch, minibatch, epochs and coefficients of a run."""
    from stable_baselines3 import PPO

    args = metta_args(flags, device)
    num_steps, minibatch_size = rollout_sizes(args, games.num_envs)
    torch.set_num_threads(threads)
    network = {
        "features_extractor_class": MettaView,
        "features_extractor_kwargs": {"flags": flags, "device": device},
        "net_arch": [],
        "ortho_init": False,
    }
    model = PPO(
        "MlpPolicy",
        games,
        learning_rate=args.learning_rate,
        n_steps=num_steps,
        batch_size=minibatch_size,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.vf_clip_coef,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef / 2,  # ours has the factor 1/2, SB3's has not
        max_grad_norm=args.max_grad_norm,
        policy_kwargs=network,
        device=device,
        seed=seed,
    )
    for head, gain in ((model.policy.action_net, 0.01), (model.policy.value_net, 1.0)):
        torch.nn.init.orthogonal_(head.weight, gain)
        torch.nn.init.zeros_(head.bias)
    return model


def sb3_arena_rate(flags: str, rule_book: bool, threads: int, seconds: float, device: str) -> dict[str, float]:
    """Agent steps per second of SB3's PPO with the settings of a run, and microseconds per step of games, other rollout
    time and learning. Whole iterations, without the first."""
    from stable_baselines3.common.callbacks import BaseCallback

    games = sb3_arena_envs(metta_args(flags, device), rule_book, torch.device(device), seen_actions=True)
    model = sb3_arena_agent(flags, games, threads, device)
    rollout_starts = []
    game_seconds = []  # at each rollout start
    rollout_ends = []

    class Clock(BaseCallback):
        def _on_rollout_start(self) -> None:
            rollout_starts.append(time.perf_counter())
            game_seconds.append(games.seconds)

        def _on_rollout_end(self) -> None:
            rollout_ends.append(time.perf_counter())

        def _on_step(self) -> bool:
            return len(rollout_starts) < 3 or time.perf_counter() - rollout_starts[1] < seconds

    model.learn(FOREVER, callback=Clock())
    iterations = len(rollout_starts) - 2
    steps = iterations * model.n_steps * games.num_envs
    total = rollout_starts[-1] - rollout_starts[1]
    playing = game_seconds[-1] - game_seconds[1]
    learning = sum(start - end for start, end in zip(rollout_starts[2:], rollout_ends[1:]))
    return {
        "env_steps_per_second": steps / total,
        "games": 1e6 * playing / steps,
        "rollouts": 1e6 * (total - playing - learning) / steps,
        "learning": 1e6 * learning / steps,
    }


class PolicyAgent(torch.nn.Module):
    """An SB3 policy with the interface that `ppo_metta.evaluate` expects, without memory.

    With a `view` its actions are relative to the agent's heading.
    """

    state_size = 0

    def __init__(self, policy: torch.nn.Module, view: TokenView | None) -> None:
        super().__init__()
        self.policy = policy
        self.view = view

    def forward(self, obs: torch.Tensor, state: torch.Tensor, reset: torch.Tensor) -> tuple:
        logits = self.policy.get_distribution(obs[0]).distribution.logits
        if self.view:
            heading = self.view.heading(obs[0])
            logits = logits.gather(1, self.view.seen_action[heading])
        return logits[None], None, state


def sb3_arena_curve(
    tuned: bool, seconds: float, every: float, goal: float, seed: int, threads: int, device: str
) -> list:
    """`learning_curve` of SB3's PPO in the arena: mean hearts."""
    from stable_baselines3 import PPO

    args = metta_args("", device)
    where = torch.device(device)
    view = arena_view(args, where) if tuned else None

    def make_model() -> Any:
        if tuned:
            games = sb3_arena_envs(args, False, where, seen_actions=True)
            return sb3_arena_agent("", games, threads, device, seed)
        torch.set_num_threads(threads)
        games = sb3_arena_envs(metta_args("--num-envs 1 --reward-scale 1", device), True, where)
        return PPO("MlpPolicy", games, device=device, seed=seed)

    def evaluate(model: Any) -> float:
        return ppo_metta.evaluate(PolicyAgent(model.policy, view), args, 48, where)["eval_score_mean"]

    return learning_curve(make_model, evaluate, seconds, every, goal)


# ------------------------------------------------------------------------------------------------ Mario

MARIO_AGENTS = {  # SB3's default buffer of a million would take 53 GiB
    "SB3's DQN, defaults": {"algorithm": "DQN", "buffer_size": 100_000},
    "SB3's DQN, our recipe": {
        "algorithm": "DQN",
        "num_envs": 16,
        "gamma": 0.97,
        "learning_rate": 5e-4,
        "buffer_size": 100_000,
        "learning_starts": 5000,
        "train_freq": 1,
        "gradient_steps": 1,
        "tau": 0.005,
        "target_update_interval": 16,
        "exploration_final_eps": 0.03,
    },
    "SB3's PPO, defaults": {"algorithm": "PPO"},
    "SB3's PPO, our network and gamma": {
        "algorithm": "PPO",
        "num_envs": 16,
        "gamma": 0.97,
        "n_steps": 128,
        "batch_size": 256,
    },
}


class MarioView(torch.nn.Module):
    """Features extractor for SB3: dqn_mario_async.py's network without its head."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__()
        args = dqn_mario_async.Args(dueling=False, stack=space.shape[0], size=space.shape[1])
        self.trunk = dqn_mario_async.QNetwork(args)
        self.trunk.head = torch.nn.Identity()
        self.features_dim = args.hidden_size

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.trunk(obs.byte())


def sb3_mario_agent(name: str, threads: int, seed: int, explored: int, device: str) -> Any:
    """An agent of MARIO_AGENTS on the training levels; a DQN explores over its first `explored` steps."""
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(threads)
    settings = {"num_envs": 1} | MARIO_AGENTS[name]
    if settings["algorithm"] == "DQN":
        settings["exploration_fraction"] = explored / FOREVER
    if "our" in name:
        policy = {"features_extractor_class": MarioView, "net_arch": [], "normalize_images": False}
        settings["policy_kwargs"] = policy
    algorithm = getattr(stable_baselines3, settings.pop("algorithm"))
    rules = dqn_mario_async.settings_of(dqn_mario_async.Args(), mario.TRAIN_LEVELS)
    games = DummyVecEnv([lambda: MarioEnv(**rules)] * settings.pop("num_envs"))
    return algorithm("CnnPolicy", games, device=device, seed=seed, **settings)


def sb3_mario_rate(seconds: float, **agent: Any) -> dict[str, float]:
    return learn_for(sb3_mario_agent(seed=1, explored=1, **agent), seconds)


def sb3_mario_curve(name: str, seconds: float, every: float, goal: float, device: str, **agent: Any) -> list:
    """`learning_curve` of an agent of MARIO_AGENTS: mean distance of greedy games on unseen levels, in pixels."""
    args = dqn_mario_async.Args()
    where = torch.device(device)

    class Greedy:
        """The interface that `dqn_mario_async.evaluate` expects."""

        def __init__(self, model: Any) -> None:
            self.model = model

        def greedy_action(self, obs: np.ndarray) -> np.ndarray:
            action, _ = self.model.predict(obs, deterministic=True)
            return action

    def evaluate(model: Any) -> float:
        return dqn_mario_async.evaluate(Greedy(model), args, 20, where)["eval_distance_mean"]

    return learning_curve(lambda: sb3_mario_agent(name, device=device, **agent), evaluate, seconds, every, goal)
