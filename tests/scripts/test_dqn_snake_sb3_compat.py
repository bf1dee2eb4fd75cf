"""The SB3-compatible trainer compared with Stable-Baselines3: numbers, files, settings, and refusals."""

import base64
import dataclasses
import io
import json
import math
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from small_runs import load, refusal, scalars
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import DummyVecEnv

import dqn_snake_sb3_compat as script
from dqn_snake_sb3_compat import Args, Cosine, QNetwork, Transformer, main

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
QUICK = dict(
    device="cpu", env_id="Snake-v0", board="6x6", total_timesteps=600, buffer_size=2000, batch_size=16, threads=1,
    learning_rate=1e-3, learning_starts=50, target_update_interval=100, eval_episodes=3, eval_every=0.0, log_every=1e9,
    video=False,
)  # fmt: skip


def slow(flags: dict):
    return pytest.param(flags, marks=pytest.mark.slow)


SB3_NAMES = "learning_rate buffer_size learning_starts batch_size tau gamma train_freq gradient_steps seed "
SB3_NAMES += "target_update_interval exploration_fraction exploration_initial_eps exploration_final_eps max_grad_norm"


class Recorded(gym.Wrapper):
    """CartPole that writes down every action it gets, and runs out of time soon."""

    actions: list = []

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gym.make("CartPole-v1", max_episode_steps=25, disable_env_checker=True))

    def step(self, action):
        Recorded.actions.append(int(action))
        return self.env.step(action)


class Pictures(gym.Env):
    """Random images, channels last."""

    observation_space, action_space = gym.spaces.Box(0, 255, (40, 36, 3), np.uint8), gym.spaces.Discrete(3)
    metadata = {"render_modes": []}

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(256, size=(40, 36, 3), dtype=np.uint8), {}

    def step(self, action):
        self.steps += 1
        obs = self.np_random.integers(256, size=(40, 36, 3), dtype=np.uint8)
        return obs, float(action == obs[0, 0, 0] % 3), self.steps % 7 == 0, self.steps % 11 == 0, {}


gym.register("Recorded-v0", lambda **kwargs: Recorded(**kwargs))
gym.register("Pictures-v0", lambda **kwargs: Pictures(**kwargs))


@pytest.fixture(autouse=True)
def process():
    """Nothing that another test left behind decides about the numbers of this one, or the other way round."""

    def reset() -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        torch.set_float32_matmul_precision("highest")

    reset()
    yield
    reset()


def theirs(flags: dict, learn: bool = True) -> DQN:
    """SB3's model with the same flags, trained for as long."""
    args = Args(**QUICK | flags)
    kwargs = {"board": tuple(map(int, args.board.split("x")))} if args.board else {}
    envs = DummyVecEnv(
        [lambda: gym.make(args.env_id, disable_env_checker=True, **kwargs) for _ in range(args.num_envs)]
    )
    extractor = {"features_extractor_class": Transformer, "features_extractor_kwargs": {"dropout": args.dropout}}
    policy_kwargs = extractor | {"net_arch": [128]} if args.policy == "transformer" else None
    policy = "CnnPolicy" if args.policy == "CnnPolicy" else "MlpPolicy"
    hyperparameters = {name: getattr(args, name) for name in SB3_NAMES.split()}
    if args.lr_schedule == "cosine":
        hyperparameters["learning_rate"] = Cosine(args.learning_rate, args.learning_rate_end)
    torch.set_num_threads(1)
    model = DQN(policy, envs, policy_kwargs=policy_kwargs, device="cpu", **hyperparameters)
    return model.learn(args.total_timesteps, log_interval=10**9) if learn else model


def assert_same_weights(folder: Path, model: DQN, atol: float) -> None:
    saved, expected = load(folder), model.policy.state_dict()
    ours = {f"{net}.{name}": tensor for net in ("q_net", "q_net_target") for name, tensor in saved[net].items()}
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------------------ the same numbers


SHORT = dict(
    env_id="Recorded-v0", board=None, learning_starts=40, exploration_initial_eps=1.0, exploration_final_eps=1.0
)


ATTENTION = dict(env_id="SnakeOneHot-v0", board="5x4", policy="transformer", dropout=0.0)


@pytest.mark.parametrize(
    "flags",
    [
        {"num_envs": 1, "gradient_steps": 1, "total_timesteps": 840},
        {"num_envs": 1, "gradient_steps": 4, "total_timesteps": 240, "max_grad_norm": 0.5},
        {"num_envs": 1, "gradient_steps": -1, "total_timesteps": 240, "tau": 0.01, "target_update_interval": 1},
        {"num_envs": 8, "gradient_steps": 1, "total_timesteps": 6440, "buffer_size": 3000},
        {"num_envs": 8, "gradient_steps": 4, "total_timesteps": 1640, "lr_schedule": "cosine", "max_grad_norm": 1.0},
        {"num_envs": 8, "gradient_steps": -1, "total_timesteps": 260, "target_update_interval": 3},
        ATTENTION | {"num_envs": 1, "total_timesteps": 840},
        slow(ATTENTION | {"num_envs": 1, "total_timesteps": 260, "gradient_steps": 4, "dropout": 0.1}),
        slow(ATTENTION | {"num_envs": 8, "total_timesteps": 260, "gradient_steps": -1, "max_grad_norm": 1e9}),
        {"env_id": "Pictures-v0", "policy": "CnnPolicy", "total_timesteps": 120},
        {"env_id": "Pictures-v0", "total_timesteps": 240},
    ],
    ids=str,
)  # fmt: skip
def test_updates_give_sb3s_weights(run, monkeypatch, flags) -> None:
    """All actions random, so both learn from the same transitions, drawn in the same order: 200 updates or more.

    The weights are equal to the bit until a gradient is clipped: SB3 sums its norm in another order. That last bit
    stays small in the small networks. But attention's bias of the keys has no gradient but rounding, of which Adam
    makes whole steps (0.06 after 76 updates), so the run in which it would be clipped is not.
    """
    flags = SHORT | flags
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a, **k: norms.append(clip(*a, **k)) or norms[-1])
    summary, folder = run(**flags)
    model = theirs(flags)
    most = (QUICK | flags).get("max_grad_norm", Args.max_grad_norm)
    assert summary["updates"] == model._n_updates == len(norms) >= (20 if "Pictures" in str(flags) else 200)
    assert_same_weights(folder, model, 0 if max(norms) < most else 1e-6)


def test_a_whole_run_makes_sb3s_decisions(run) -> None:
    """5,000 identical actions from explored to greedy play, through 200 truncations and many falls."""
    flags = dict(env_id="Recorded-v0", board=None, total_timesteps=5000, batch_size=32, exploration_fraction=0.5)
    Recorded.actions = []
    _, folder = run(**flags, eval_episodes=1)
    ours = Recorded.actions[:5000]
    Recorded.actions = []
    model = theirs(flags)
    assert ours == Recorded.actions
    assert_same_weights(folder, model, 1e-5)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_whole_updates_against_ten_lines_in_double_precision(run, monkeypatch, num_envs) -> None:
    """42 updates written out: Huber loss, clipping, Adam, a falling learning rate, target updates on the way."""
    made, batches, norms, init, gather = [], [], [], QNetwork.__init__, script.ReplayBuffer.transitions_at

    def keep(self, *arguments) -> None:
        init(self, *arguments)
        made.append({name: weight.detach().double().clone() for name, weight in self.named_parameters()})

    def record(self, index):
        batches.append([ring.clone() for ring in gather(self, index)])
        return gather(self, index)

    monkeypatch.setattr(QNetwork, "__init__", keep)
    monkeypatch.setattr(script.ReplayBuffer, "transitions_at", record)
    flags = dict(
        num_envs=num_envs, total_timesteps=100 * num_envs, learning_starts=19 * num_envs, train_freq=4,
        gradient_steps=2, learning_rate=1e-2, lr_schedule="cosine", learning_rate_end=1e-4, max_grad_norm=0.4,
        gamma=0.9, tau=0.3, target_update_interval=6 * num_envs, env_id="CartPole-v1", board=None,
    )  # fmt: skip
    _, folder = run(**flags)
    online = {name: weight.requires_grad_() for name, weight in made[0].items()}
    target = {name: weight.detach().clone() for name, weight in online.items()}
    mean = {name: torch.zeros_like(weight) for name, weight in online.items()}
    square = {name: torch.zeros_like(weight) for name, weight in online.items()}

    def values(w: dict, obs: torch.Tensor) -> torch.Tensor:
        x = (obs.double() @ w["q_net.0.weight"].T + w["q_net.0.bias"]).clamp(min=0)
        x = (x @ w["q_net.2.weight"].T + w["q_net.2.bias"]).clamp(min=0)
        return x @ w["q_net.4.weight"].T + w["q_net.4.bias"]

    updates = 0
    for call in range(1, 101):
        if call % 6 == 0:
            target = {name: 0.7 * old + 0.3 * online[name].detach() for name, old in target.items()}
        if call % 4 or call < 20:
            continue
        rate = 1e-4 + (1e-2 - 1e-4) * 0.5 * (1 + math.cos(math.pi * call / 100))
        for _ in range(2):
            obs, next_obs, action, reward, discount = batches[updates]
            updates += 1
            wanted = reward + discount * values(target, next_obs).amax(1)
            error = (values(online, obs)[torch.arange(16), action] - wanted).abs()
            loss = torch.where(error < 1, error**2 / 2, error - 0.5).mean()
            grads = dict(zip(online, torch.autograd.grad(loss, list(online.values()))))
            norm = sum((grad**2).sum() for grad in grads.values()).sqrt()
            norms.append(norm.item())
            for name, grad in grads.items():
                grad = grad * min(0.4 / norm, 1)
                mean[name] = 0.9 * mean[name] + 0.1 * grad
                square[name] = 0.999 * square[name] + 0.001 * grad**2
                step = mean[name] / (1 - 0.9**updates) / ((square[name] / (1 - 0.999**updates)).sqrt() + 1e-8)
                online[name].data -= rate * step
    assert updates == len(batches) == 42 and set(batches[-1][4].unique().tolist()) <= {0.0, float(np.float32(0.9))}
    assert min(norms) < 0.35 and max(norms) > 0.45  # some were clipped and some not
    saved = load(folder)
    for name in online:
        torch.testing.assert_close(saved["q_net"][name].double(), online[name].detach(), atol=1e-4, rtol=0)
        torch.testing.assert_close(saved["q_net_target"][name].double(), target[name], atol=1e-4, rtol=0)


def test_default_hyperparameters_are_sb3s() -> None:
    import inspect

    defaults = {name: value.default for name, value in inspect.signature(DQN.__init__).parameters.items()}
    for field in dataclasses.fields(Args):
        if field.name in SB3_NAMES.split() and field.name != "seed":
            assert field.default == defaults[field.name], field.name


def test_the_transformer_is_system_as() -> None:
    env = gym.make("SnakeOneHot-v0")
    q_network = QNetwork(Args(policy="transformer"), env)
    assert sum(weight.numel() for weight in q_network.parameters()) == 92_676
    head = torch.zeros(1, 20, 20, 3)
    head[0, :, :, 2] = 1
    moved = head.clone()
    head[0, 3, 4], moved[0, 4, 3] = torch.eye(3)[0], torch.eye(3)[0]
    q_network.eval()
    assert not torch.allclose(q_network(head), q_network(moved))  # rows and columns are told apart


# ------------------------------------------------------------------------------------------------ files both ways


@pytest.mark.parametrize(
    "flags", [{}, slow({"policy": "transformer", "env_id": "SnakeOneHot-v0", "lr_schedule": "cosine"})], ids=str
)
def test_sb3_loads_what_is_exported_and_goes_on(run, tmp_path, flags) -> None:
    path = tmp_path / "model.zip"
    summary, folder = run(export_sb3=str(path), **flags)
    env = gym.make((QUICK | flags)["env_id"], board=(6, 6))
    model = DQN.load(path, env=env, device="cpu")
    assert model.num_timesteps == 600 and model._n_updates == summary["updates"] and model.batch_size == 16
    q_network = QNetwork(Args(**QUICK | flags), env).eval()
    q_network.load_state_dict(load(folder)["q_net"])
    obs = np.random.default_rng(0).integers(
        0, env.observation_space.high.max() + 1, (10_000, *env.observation_space.shape)
    )
    with torch.no_grad():
        expected = q_network(torch.as_tensor(obs)).argmax(1).numpy()
    np.testing.assert_array_equal(model.predict(obs.astype(np.uint8), deterministic=True)[0], expected)
    before = [weight.clone() for weight in model.policy.q_net.parameters()]
    model.learn(300, reset_num_timesteps=False, log_interval=10**9)
    assert model.num_timesteps == 900 and len(model.policy.optimizer.state) == len(before)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.policy.q_net.parameters()))


@pytest.mark.parametrize("num_envs", [1, 8])
def test_an_imported_training_goes_on_as_in_sb3(run, tmp_path, num_envs, monkeypatch) -> None:
    flags = SHORT | {"num_envs": num_envs, "total_timesteps": 800}
    theirs(flags).save(tmp_path / "model.zip")
    model = DQN.load(tmp_path / "model.zip", device="cpu", env=theirs(flags, learn=False).get_env())
    model.learn(800, reset_num_timesteps=False, log_interval=10**9)
    words = f"x --import-sb3 {tmp_path / 'model.zip'} --total-timesteps 800 --env-id Recorded-v0 --run-dir {tmp_path} "
    words += "--run-name run --eval-episodes 1 --eval-every 0 --no-video --device cpu --threads 1 --seed 1"
    monkeypatch.setattr(sys, "argv", words.split())
    args = script.parse_args()
    assert (args.batch_size, args.learning_rate, args.num_envs, args.gamma) == (16, 1e-3, num_envs, 0.99)
    summary = main(args)
    assert summary["updates"] == model._n_updates and summary["env_steps"] == model.num_timesteps
    assert_same_weights(tmp_path / "run", model, 1e-6)


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_zips_that_do_not_fit_are_refused_and_nothing_in_them_runs(run, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run(export_sb3="good.zip")
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").save("ppo.zip")
    theirs({"env_id": "CartPole-v1", "board": None}, learn=False).save("cartpole.zip")
    Path("truncated.zip").write_bytes(Path("good.zip").read_bytes()[:5000])
    Path("text.zip").write_text("hello")
    with zipfile.ZipFile("good.zip") as good, zipfile.ZipFile("hostile.zip", "w") as hostile:
        for name in good.namelist():
            file = io.BytesIO()
            torch.save(Malicious(), file)
            hostile.writestr(name, file.getvalue() if name == "policy.pth" else good.read(name))
    for name in ("missing.zip", "ppo.zip", "cartpole.zip", "truncated.zip", "text.zip", "hostile.zip"):
        assert f"--import-sb3 {name}" in refusal(capsys, run, import_sb3=name)
    payload = base64.b64encode(pickle.dumps(Malicious())).decode()
    space = {":type:": "x", ":serialized:": payload, "_shape": [6, 6], "dtype": "uint8"}
    with_data("good.zip", "pickled.zip", observation_space=space, action_space=space, hook=space)
    run(import_sb3="pickled.zip", total_timesteps=60, run_name="pickled")
    assert not Path("executed").exists()


def with_data(source: str, target: str, **changes) -> None:
    """A copy of a zip with other hyperparameters."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "data":
                content = json.dumps(json.loads(content) | changes)
            new.writestr(name, content)


class Halved(torch.nn.Flatten):
    """A features extractor without weights."""

    features_dim = 4

    def __init__(self, observation_space) -> None:
        super().__init__()

    def forward(self, obs):
        return obs / 2


FOREIGN = {  # hyperparameters of SB3 that have no equal here, and the word that names them
    "activation_fn": {"policy_kwargs": {"activation_fn": torch.nn.Tanh}},
    "normalize_images": {"policy_kwargs": {"normalize_images": False}},
    "features_extractor_class": {"policy_kwargs": {"features_extractor_class": Halved}},
    "optimizer_class": {"policy_kwargs": {"optimizer_class": torch.optim.AdamW}},
    "torch.optim.sgd": {"policy_kwargs": {"optimizer_class": torch.optim.SGD}},
    "eps": {"policy_kwargs": {"optimizer_kwargs": {"eps": 1e-5}}},
    "betas": {"policy_kwargs": {"optimizer_kwargs": {"betas": (0.8, 0.999)}}},
    "weight_decay": {"policy_kwargs": {"optimizer_kwargs": {"weight_decay": 0.1}}},
    "amsgrad": {"policy_kwargs": {"optimizer_kwargs": {"amsgrad": True}}},
    "its n_steps": {"n_steps": 3},
    "train_freq": {"train_freq": (4, "episode")},
    "learning_rate": {"learning_rate": lambda remaining: 1e-3 * remaining},
    "replay_buffer_kwargs": {"replay_buffer_kwargs": {"handle_timeout_termination": False}},
    "gradient-steps": {"gradient_steps": 0},
}  # fmt: skip


@pytest.mark.parametrize("word", FOREIGN)
def test_a_zip_that_learns_otherwise_is_refused(run, tmp_path, capsys, word) -> None:
    DQN("MlpPolicy", "CartPole-v1", device="cpu", **{"buffer_size": 100} | FOREIGN[word]).save(tmp_path / "model.zip")
    words = f"--import-sb3 {tmp_path / 'model.zip'} --env-id CartPole-v1"
    assert word in refusal(capsys, lambda: script.fill_defaults(parse_words(words), CPU))


def parse_words(words: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *words.split()])
        return script.parse_args()


TAKEN_OVER = dict(
    buffer_size=1234, learning_starts=17, batch_size=9, tau=0.25, gamma=0.75, gradient_steps=-1, num_envs=2,
    target_update_interval=33, exploration_fraction=0.5, exploration_initial_eps=0.75, exploration_final_eps=0.5,
    max_grad_norm=3.0, learning_rate=0.125, train_freq=7, seed=11,
)  # fmt: skip
COSINE = dict(lr_schedule="cosine", learning_rate_end=0.01, policy="transformer", dropout=0.3, env_id="SnakeOneHot-v0")


@pytest.mark.parametrize("more", [{}, COSINE], ids=["plain", "cosine transformer"])
@pytest.mark.parametrize("writer", ["ours", "theirs", "ours through theirs"])
def test_all_hyperparameters_are_taken_over(run, tmp_path, writer, more) -> None:
    """Every second value of TAKEN_OVER differs from every default."""
    flags, path = TAKEN_OVER | more, tmp_path / "model.zip"
    if writer == "theirs":
        theirs(flags, learn=False).save(path)
    else:
        run(export_sb3=str(path), **flags | {"total_timesteps": 28})
    if writer == "ours through theirs":
        model = DQN.load(path, device="cpu")
        assert tuple(model.train_freq) == (7, TrainFrequencyUnit.STEP)
        model.save(path)
    args = parse_words(f"--import-sb3 {path}")
    expected = {name: value for name, value in flags.items() if name != "env_id"}
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("file", [True, False])
def test_the_command_line_and_settings_beat_a_zip(run, tmp_path, monkeypatch, file) -> None:
    run(export_sb3=str(tmp_path / "model.zip"), total_timesteps=28)
    if file:
        monkeypatch.setenv("OPTIMAL_BATCH_SIZE", "64")
    words = f"--import-sb3 {tmp_path / 'model.zip'} --gamma 0.5" + " --batch-size 64" * (not file)
    args = parse_words(words)
    assert (args.batch_size, args.gamma) == (64, 0.5)


def test_an_imported_training_makes_the_games_and_steps_asked_for(run, tmp_path, capsys) -> None:
    first, _ = run(export_sb3=str(tmp_path / "a.zip"), total_timesteps=400)
    more = dict(import_sb3=str(tmp_path / "a.zip"), total_timesteps=None, episodes=20, learning_starts=50)
    second, folder = run(run_name="second", **more)
    assert first["episodes"] + 20 <= second["episodes"] < first["episodes"] + 24
    said = capsys.readouterr().out
    assert f"{second['episodes']} games took {second['env_steps']} steps" in said
    more_games = second["episodes"] + 10
    words = f"--resume {folder} --episodes {more_games} --run-dir {tmp_path}"  # the command that it prints, and further
    args = parse_words(words)
    assert args.import_sb3 is args.export_sb3 is None
    third = main(args)
    assert more_games <= third["episodes"] < more_games + 4
    third, _ = run(run_name="third", **more | {"episodes": None, "total_timesteps": 200})
    assert third["env_steps"] == 600


BROKEN_ZIPS = {
    "a weight is missing": lambda p, o: p.pop("q_net.q_net.0.bias"),
    "a weight too many": lambda p, o: p.update(extra=torch.zeros(1)),
    "no tensor": lambda p, o: p.update({"q_net.q_net.0.bias": [0.0] * 64}),
    "moments of another shape": lambda p, o: o["state"][1].update(exp_avg=torch.zeros(6, 6)),
    "moments of a weight missing": lambda p, o: o["state"].pop(3),
    "moments of other names": lambda p, o: o["state"].update({"0": o["state"].pop(0)}),
    "state of another type": lambda p, o: o.update(state=[1, 2]),
    "no state": lambda p, o: o.pop("state"),
}
BROKEN_DATA = {
    "steps are a word": {"num_timesteps": "many"},
    "steps are negative": {"num_timesteps": -1},
    "updates are a list": {"_n_updates": []},
    "epsilon is nothing": {"exploration_rate": None},
    "batch is half": {"batch_size": 16.5},
    "seed is a word": {"seed": "one"},
    "gamma is true": {"gamma": True},
    "policy_kwargs is a number": {"policy_kwargs": 5},
    "extractor is a number": {"policy_kwargs": {"features_extractor_class": 5}},
    "train_freq is a word": {"train_freq": "often"},
    "train_freq is no pickle": {"train_freq": {":serialized:": "AAAA"}},
    "policy_class is missing": {"policy_class": None},
}


@pytest.fixture(scope="module")
def good_zip(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    main(Args(**QUICK | {"run_dir": str(folder), "export_sb3": str(folder / "good.zip"), "total_timesteps": 80}))
    return folder / "good.zip"


class ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickle an enum; others write its value."""

    def __init__(self, unit: TrainFrequencyUnit) -> None:
        self.unit = unit

    def __reduce__(self) -> tuple:
        return getattr, (TrainFrequencyUnit, self.unit.name)


@pytest.mark.parametrize("unit", TrainFrequencyUnit)
def test_a_train_frequency_of_another_python_is_read(tmp_path, capsys, good_zip, unit) -> None:
    pickled = base64.b64encode(pickle.dumps(TrainFreq(7, ByName(unit)))).decode()
    with_data(good_zip, tmp_path / "other.zip", train_freq={":serialized:": pickled})
    if unit is TrainFrequencyUnit.STEP:
        assert parse_words(f"--import-sb3 {tmp_path / 'other.zip'}").train_freq == 7
    else:
        line = refusal(capsys, parse_words, f"--import-sb3 {tmp_path / 'other.zip'}")
        assert "its train_freq is in episodes; only steps work" in line


@pytest.mark.parametrize("name", [*BROKEN_ZIPS, *BROKEN_DATA])
def test_malformed_zips_are_refused_in_one_line(run, tmp_path, capsys, good_zip, name) -> None:
    if name in BROKEN_DATA:
        with_data(good_zip, tmp_path / "bad.zip", **BROKEN_DATA[name])
    else:
        with zipfile.ZipFile(good_zip) as old, zipfile.ZipFile(tmp_path / "bad.zip", "w") as new:
            names = "policy.pth", "policy.optimizer.pth"
            policy, optimizer = (torch.load(io.BytesIO(old.read(part))) for part in names)
            BROKEN_ZIPS[name](policy, optimizer)
            for part, value in zip(names, (policy, optimizer)):
                file = io.BytesIO()
                torch.save(value, file)
                new.writestr(part, file.getvalue())
            new.writestr("data", old.read("data"))
    assert "--import-sb3" in refusal(capsys, run, import_sb3=str(tmp_path / "bad.zip"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [".", "", "nowhere/a.zip", "folder"])
def test_an_export_that_cannot_be_written_is_refused_at_start(run, tmp_path, monkeypatch, capsys, name) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert refusal(capsys, run, export_sb3=name).startswith(f"{script.SCRIPT}.py: --export-sb3")
    assert not Path("run").exists()


def test_an_export_that_fails_at_the_end_loses_nothing(run, tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "model.zip"
    path.write_bytes(b"an older one")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.zipfile.ZipFile, "writestr", full)
    summary, folder = run(export_sb3=str(path))
    assert "No space left" in capsys.readouterr().err and path.read_bytes() == b"an older one"
    assert json.loads((folder / "summary.json").read_text()) == summary and summary["eval_episodes"] == 3
    assert not list(tmp_path.glob("*.tmp")) and load(folder)["global_step"] == 600


# ------------------------------------------------------------------------------------------------ settings


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """The arguments for a command line, an environment and an .env file."""

    def start(words: str = "", environment: dict | None = None, file: str | None = None):
        monkeypatch.chdir(tmp_path)
        for name in script.SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        if file is not None:
            Path(".env").write_text(file)
        monkeypatch.setattr(sys, "argv", ["script", *words.split()])
        return script.parse_args()

    return start


def test_flags_beat_the_environment_beats_the_file_beats_the_default(parse) -> None:
    file = "# fast\nOPTIMAL_BATCH_SIZE=512\nUSE_BF16=yes\nUSE_FLASH_ATTENTION=on\n"
    assert parse().batch_size == 32 and not parse().bf16
    args = parse(file=file)
    assert (args.batch_size, args.bf16, args.flash_attention, args.compile) == (512, True, True, False)
    args = parse(environment={"OPTIMAL_BATCH_SIZE": "64", "USE_BF16": "0"}, file=file)
    assert (args.batch_size, args.bf16, args.flash_attention) == (64, False, True)
    args = parse("--batch-size 8 --no-flash-attention", {"OPTIMAL_BATCH_SIZE": "64"}, file)
    assert (args.batch_size, args.flash_attention) == (8, False)


@pytest.mark.parametrize(
    "text",
    [
        "OPTIMAL_BATCH_SIZE=many",
        f"OPTIMAL_BATCH_SIZE={'9' * 5000}",
        "OPTIMAL_BATCH_SIZE",
        "USE_BF16=maybe",
        "USE_TORCH_COMPILE=",
    ],  # fmt: skip
)
def test_unreadable_settings_are_refused_by_name(parse, capsys, text) -> None:
    line = refusal(capsys, parse, file=text)
    assert text[:50] in line and ".env" in line


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run folder with all that a checkpoint can hold."""
    folder = tmp_path_factory.mktemp("whole")
    main(Args(**QUICK | {"run_dir": str(folder), "run_name": "run", "checkpoint_replay": True, "total_timesteps": 100}))
    return folder / "run"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_a_checkpoint_names_no_module_and_no_file(copy, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "hostile_module.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    saved = load(copy)
    saved["args"] |= {"env_id": "hostile_module:X-v0", "export_sb3": "mine.zip", "import_sb3": "other.zip"}
    torch.save(saved, copy / "checkpoint.pt")
    for flag in ("resume", "evaluate"):
        assert "hostile_module:X-v0" in refusal(capsys, parse_words, f"--{flag} {copy}")
    args = parse_words(f"--resume {copy} --env-id Snake-v0 --total-timesteps 200")
    assert args.env_id == "Snake-v0" and args.export_sb3 is args.import_sb3 is None
    main(args)
    assert not Path("executed").exists() and not Path("mine.zip").exists()


# ------------------------------------------------------------------------------------------------ the loop


def test_episodes_end_the_run_and_their_steps_are_named(run, capsys) -> None:
    summary, folder = run(episodes=20, total_timesteps=None)
    assert (
        summary["episodes"] >= 20
        and f"{summary['episodes']} games took {summary['env_steps']} steps" in capsys.readouterr().out
    )


def test_a_gradient_that_is_not_finite_ends_the_run_too(run, monkeypatch, capsys) -> None:
    """Also where the loss itself is finite: such updates are skipped, and a run that only skips learns nothing."""
    grad = torch.autograd.grad
    monkeypatch.setattr(script.torch.autograd, "grad", lambda *a: [part * math.nan for part in grad(*a)])
    assert "the loss is nan" in refusal(capsys, run, log_every=1e-9)


def test_training_and_evaluation_share_no_seed(run, monkeypatch) -> None:
    seeds, reset = [], script.SnakeEnv.reset
    monkeypatch.setattr(script.SnakeEnv, "reset", lambda self, **k: seeds.append(k.get("seed")) or reset(self, **k))
    highest = script.EVAL_SEED - script.MAX_GAMES
    run(seed=highest, num_envs=3, total_timesteps=60, eval_episodes=5)
    given = [seed for seed in seeds if seed is not None]
    assert given == [highest, highest + 1, highest + 2, *(script.EVAL_SEED + lane for lane in range(5))]
    assert script.EVAL_SEED + script.MAX_GAMES == 2**31  # some games take no larger one
    with pytest.raises(SystemExit):
        run(seed=highest + 1, num_envs=3, run_name="higher")


@pytest.mark.parametrize("env_id", ["Snake-v0", "CartPole-v1"])
def test_evaluation_plays_every_game_once_to_its_end(env_id) -> None:
    """Against one game after the other, with the same greedy policy and the same seeds."""
    args = Args(**QUICK | {"env_id": env_id, "board": "6x6" if env_id == "Snake-v0" else None})
    torch.manual_seed(0)
    (env,) = script.make_envs(args, 1)
    q_network = QNetwork(args, env)
    scores = []
    for lane in range(7):
        obs, done, score = env.reset(seed=script.EVAL_SEED + lane)[0], False, 0.0
        while not done:
            action = q_network(torch.as_tensor(obs)[None]).argmax().item()
            obs, reward, terminated, truncated, info = env.step(action)
            done = terminated or truncated
            score += reward
        scores.append(info.get("score", score))
    assert len(set(scores)) > 1
    result = script.evaluate(q_network, args, 7, CPU)
    expected = {"mean": np.mean(scores), "max": max(scores)}
    assert result == {f"eval_score_{name}": value for name, value in expected.items()} | {"eval_episodes": 7}


def test_the_transformer_acts_and_is_evaluated_without_dropout(run, monkeypatch) -> None:
    modes, forward = set(), Transformer.forward

    def watched(self, obs):
        modes.add((self.training, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return forward(self, obs)

    monkeypatch.setattr(Transformer, "forward", watched)
    run(policy="transformer", env_id="SnakeOneHot-v0", dropout=0.5, total_timesteps=200)
    learning, acting, target_or_evaluation = (True, False, True), (False, True, False), (False, False, False)
    assert modes == {learning, acting, target_or_evaluation}


def test_time_limits_bootstrap_and_ends_do_not(run) -> None:
    _, folder = run(**SHORT, checkpoint_replay=True, gamma=0.5)
    replay = load(folder)["replay"]
    obs, next_obs, discount = (replay[name][: replay["steps"]] for name in ("obs", "next_obs", "discount"))
    fell = (next_obs[:, 0].abs() > 2.4) | (next_obs[:, 2].abs() > 0.2095)
    assert fell.any() and torch.equal(discount == 0, fell) and set(discount[~fell].tolist()) == {0.5}
    follows = (next_obs[:-1] == obs[1:]).all(1)
    assert not follows[fell[:-1]].any() and (~follows & ~fell[:-1]).any()  # some ran out of time; the final one is kept


def interrupt_after(monkeypatch, calls: int) -> None:
    """Ctrl-C at a fixed step of the game."""
    import signal

    from envs.snake.rules import SnakeEnv

    count, step = [], SnakeEnv.step

    def counting(self, action):
        count.append(1)
        if len(count) == calls:
            signal.raise_signal(signal.SIGINT)
        return step(self, action)

    monkeypatch.setattr(SnakeEnv, "step", counting)


@pytest.mark.parametrize(
    "flags",
    [{}, {"num_envs": 3, "gradient_steps": -1}, slow({"policy": "transformer", "env_id": "SnakeOneHot-v0"})],
    ids=str,
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run, monkeypatch, capsys, flags) -> None:
    flags = dict(checkpoint_replay=True) | flags
    _, whole = run(run_name="whole", **flags)
    interrupt_after(monkeypatch, 300)
    _, halves = run(run_name="halves", **flags)
    assert f"--resume {halves}" in capsys.readouterr().out and 300 <= load(halves)["global_step"] < 330
    monkeypatch.undo()
    summary, _ = run(run_name="halves", resume=str(halves), **flags)
    expected, got = load(whole), load(halves)
    for part in ("q_net", "q_net_target"):
        for name, value in expected[part].items():
            assert torch.equal(value, got[part][name]), name
    for name, value in expected["replay"].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(got["replay"][name])), name
    for name in ("envs", "returns", "lengths", "action_space", "numpy", "epsilon", "calls", "episodes"):
        assert expected[name] == got[name], name
    assert torch.equal(expected["torch"], got["torch"])
    assert summary["env_steps"] == expected["global_step"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [SHORT, ATTENTION | {"total_timesteps": 200}], ids=str)
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compiled_learns_what_eager_learns(run, flags) -> None:
    """The same updates with other last bits: after 140 of the MLP 7e-8 apart, after 38 of the transformer 2e-5.

    The MLP twice in one process with other numbers, since what is compiled first must not serve the second.
    """
    settings = [{"lr_schedule": "cosine", "tau": 0.5}, {"gamma": 0.5, "max_grad_norm": 0.1}]
    for number, more in enumerate(settings[:1] if "policy" in flags else settings):
        more |= {"log_every": 1e9}
        _, eager = run(run_name=f"eager{number}", **flags, **more)
        summary, compiled = run(run_name=f"compiled{number}", compile=True, **flags, **more)
        assert summary["compiled"] and load(compiled)["optimizer"]["step"].item() == summary["updates"] > 30
        assert scalars(compiled)["losses/td_loss"][-1] == pytest.approx(scalars(eager)["losses/td_loss"][-1], rel=1e-3)
        for name, value in load(eager)["q_net"].items():
            atol = 1e-3 if "policy" in flags else 1e-5
            torch.testing.assert_close(load(compiled)["q_net"][name], value, atol=atol, rtol=0)


def test_adam_is_pytorchs_to_the_bit_and_skips_what_is_not_finite() -> None:
    theirs, ours = torch.nn.Parameter(torch.randn(1000)), torch.zeros(3, 1000)
    ours[0] = theirs.detach()
    optimizer, step = torch.optim.Adam([theirs], 1e-3), torch.zeros(1, dtype=torch.float64)
    for number in range(50):
        theirs.grad = torch.randn(1000) * 10.0 ** -torch.randint(9, (1000,))
        optimizer.step()
        before = ours.clone()
        for finite in (False, True) if number % 7 == 0 else (True,):
            grad = theirs.grad if finite else torch.full((1000,), math.nan)
            assert finite or torch.equal(ours, before)
            script.adam(*ours[:1], grad, *ours[1:], step, torch.full_like(step, 1e-3), torch.tensor(finite))
    assert torch.equal(ours[0], theirs) and step.item() == 50


def bias(summary: dict, folder: Path) -> list[float]:
    return list(load(folder)["q_net"].values())[-1].tolist()


def updates(summary: dict, folder: Path) -> int:
    return load(folder)["updates"]


FLAGS = {  # another value than QUICK's, and where it shows
    "seed": (2, bias),
    "total_timesteps": (800, lambda s, f: s["env_steps"]),
    "run_name": ("other", lambda s, f: f.name),
    "env_id": ("SnakeBlocks-v0", lambda s, f: scalars(f)["charts/episodic_return"][-1] < -100),
    "board": ("5x7", lambda s, f: load(f)["obs"].shape),
    "num_envs": (3, lambda s, f: load(f)["obs"].shape),
    "policy": ("transformer", lambda s, f: s["sdpa"]),
    "learning_rate": (1e-2, bias),
    "lr_schedule": ("cosine", lambda s, f: scalars(f)["train/learning_rate"][-1]),
    "buffer_size": (100, bias),
    "learning_starts": (300, updates),
    "batch_size": (32, lambda s, f: round(s["replay_ratio"])),
    "tau": (0.5, lambda s, f: list(load(f)["q_net_target"].values())[-1].tolist()),
    "gamma": (0.5, bias),
    "train_freq": (8, updates),
    "gradient_steps": (3, updates),
    "target_update_interval": (50, lambda s, f: list(load(f)["q_net_target"].values())[-1].tolist()),
    "exploration_fraction": (1.0, lambda s, f: load(f)["action_space"]),
    "exploration_initial_eps": (0.3, lambda s, f: load(f)["action_space"]),
    "exploration_final_eps": (0.3, lambda s, f: scalars(f)["rollout/exploration_rate"][-1]),
    "max_grad_norm": (1e-3, bias),
    "threads": (2, lambda s, f: s["device"]),
    "log_every": (1e-6, lambda s, f: len(scalars(f)["charts/SPS"]) > 20),
    "eval_every": (1e-6, lambda s, f: len(scalars(f)["eval/score_mean"]) > 1),
    "eval_episodes": (4, lambda s, f: s["eval_episodes"]),
    "checkpoint_replay": (True, lambda s, f: "replay" in load(f)),
    "video": (True, lambda s, f: (f / "videos" / "game.gif").exists()),
}
ELSEWHERE = {  # have a test of their own, here or for the same block in test_dqn_snake.py
    "device", "max_seconds", "episodes", "run_dir", "bf16", "fp16", "tf32", "compile", "compile_mode", "cudagraph",
    "sdpa", "flash_attention", "dropout", "learning_rate_end", "checkpoint_every", "resume",
    "evaluate", "render", "import_sb3", "export_sb3", "wandb",
}  # fmt: skip


class Large(gym.Env):
    """A game without end, drawn large."""

    observation_space, action_space = gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array", "human"]}
    drawn = 0

    def __init__(self, render_mode: str | None = None) -> None:
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 0.0, False, Large.drawn == 0 and self.steps % 50 == 0, {}

    def render(self):
        Large.drawn += 1
        if Large.drawn > 30:
            raise RuntimeError("drawn too often")
        return np.full((1000, 2000, 3), Large.drawn % 256, np.uint8)


gym.register("Large-v0", lambda **kwargs: Large(**kwargs))


def test_a_gif_is_bounded_in_frames_and_size_and_written_as_it_comes(run, monkeypatch) -> None:
    from PIL import Image

    monkeypatch.setattr("envs.playing.MAX_GIF_FRAMES", 20)
    Large.drawn = 0
    _, folder = run(env_id="Large-v0", board=None, video=True, total_timesteps=60)
    with Image.open(folder / "videos" / "game.gif") as gif:
        assert gif.size == (640, 320) and gif.n_frames == 20
    assert Large.drawn == 20


def test_a_game_that_cannot_be_drawn_costs_one_line(run, capsys, monkeypatch) -> None:
    Large.drawn = 0
    monkeypatch.setattr(Large, "render", lambda _: 1 / 0)
    summary, folder = run(env_id="Large-v0", board=None, video=True, total_timesteps=60)
    assert "--video: no GIF of Large-v0 (ZeroDivisionError: division by zero)" in capsys.readouterr().out
    assert json.loads((folder / "summary.json").read_text()) == summary and summary["eval_episodes"] == 3
    line = refusal(capsys, run, env_id="Large-v0", board=None, evaluate=str(folder), render=True)
    assert "--render: Large-v0 cannot be shown" in line


def test_render_without_pygame_is_one_line(run, capsys, monkeypatch) -> None:
    _, folder = run(env_id="CartPole-v1", board=None, total_timesteps=60)
    monkeypatch.setitem(sys.modules, "pygame", None)
    line = refusal(capsys, run, env_id="CartPole-v1", board=None, evaluate=str(folder), render=True)
    assert "pygame" in line and "pip install" in line


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("flags", [{}, {"bf16": True}, {"fp16": True}, {"tf32": True}], ids=str)
def test_graphs_learn_what_eager_learns(run, flags) -> None:
    flags = SHORT | flags | {"device": "cuda", "lr_schedule": "cosine"}
    _, eager = run(run_name="eager", **flags)
    summary, graphs = run(run_name="graphs", cudagraph=True, **flags)
    assert summary["cudagraph"]
    for name, value in load(eager)["q_net"].items():
        torch.testing.assert_close(load(graphs)["q_net"][name], value, atol=1e-2, rtol=1e-2)
