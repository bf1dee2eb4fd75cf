"""The original Super Mario Bros. (NES) with the actions, rewards, ends and pictures of envs/mario/game.py.

Needs `stable-retro` and a ROM: `rom=PATH`, or the file inside an installed `gym-super-mario-bros`. It uses the emulator
of stable-retro without its Gym layer. A process can have only one emulator, so a batch has one lane.
"""

import gc
import importlib.util
import math
import re
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from envs.mario.batch import MarioBatch, MarioEnv
from envs.mario.game import DOWN, JUMP, LEFT, RIGHT, RUN, UP, check_timing
from envs.streams import Stream

BUTTONS = (RUN, 0, 0, 0, UP, DOWN, LEFT, RIGHT, JUMP)  # B, none, SELECT, START, UP, DOWN, LEFT, RIGHT, A
START_BUTTON = 3
PRESSED = [np.array([bool(held & button) for button in BUTTONS], np.uint8) for held in range(64)]
NOTHING = PRESSED[0]
# Addresses in the 2 KiB of RAM.
MODE = 0x770
TASK = 0x772
PLAYER = 0x0E
FLOAT = 0x1D
BELOW = 0xB5
X_PAGE = 0x6D
X_PIXEL = 0x86
KINDS = 0x16  # types of the five moving objects
SCORE = 0x7DD
WORLD = 0x75F
STAGE = 0x75C
AREA = 0x760
TITLE_TIMER = 0x7A0
OLD_BUTTONS = 0x0D  # A and B in the last frame
A_BUTTON = 0x80  # bit of A in OLD_BUTTONS


def find_rom(rom: str | None = None) -> Path:
    """Path of the ROM: `rom`, or the file inside an installed gym-super-mario-bros, which is not imported.

    Raises ValueError if there is no such file or it is not Super Mario Bros.
    """
    package = importlib.util.find_spec("gym_super_mario_bros")
    path = Path(rom) if rom else None
    if path is None and package is not None:
        path = Path(package.origin).parent / "_roms" / "super-mario-bros.nes"
    if path is None:
        raise ValueError(
            "rom: none given and gym-super-mario-bros is not installed (looked for gym_super_mario_bros/_roms/"
            "super-mario-bros.nes on the Python path); give rom=PATH of a .nes file of Super Mario Bros."
        )
    if not path.is_file() or path.suffix != ".nes":
        raise ValueError(f"rom {path}: no such .nes file; give the path of a .nes file of Super Mario Bros.")
    data = path.read_bytes()
    # Dumps differ in a few bytes of graphics and title. The end of the program (a table and the interrupt vectors) is
    # the same in all dumps and differs from other games.
    program_end = data[16 + 0x7FF0 : 16 + 0x8000]
    if data[:4] != b"NES\x1a" or zlib.crc32(program_end) != 0xC7BAB0FB:
        raise ValueError(f"rom {path}: not Super Mario Bros. (NES); give the path of a .nes file of that game")
    return path


def area_weights(pixels: int, size: int) -> np.ndarray:
    """(size, pixels) float32 weights that resize a line of `pixels` to `size` by area averaging."""
    edges = np.arange(size + 1) * pixels / size
    pixel = np.arange(pixels)
    first = np.maximum(edges[:-1, None], pixel)
    last = np.minimum(edges[1:, None], pixel + 1)
    overlap = np.maximum(last - first, 0)
    return (overlap * size / pixels).astype(np.float32)


class NesGame:
    """One emulator with the interface of `MarioGame`.

    `stages` are the levels, of which one is drawn for each game: "1-1,1-2". A game starts from a saved state at the
    level's first controllable frame, which takes no time and always shows the same pictures. `practice` is the chance
    that it starts elsewhere, along the game that got furthest so far (as in Salimans and Chen 2018): up to 32 steps
    before a place where one of the last 64 lost games ended. Raises ValueError for an invalid setting or ROM, or if
    there is no emulator.
    """

    max_steps = 2500  # the game's own time runs out after about 2,400 steps

    def __init__(
        self,
        rom: str | None = None,
        stages: str = "1-1",
        size: int = 84,
        skip: int = 4,
        noop_max: int = 30,
        practice: float = 0.0,
    ) -> None:
        if not re.fullmatch("[1-8]-[1-4](,[1-8]-[1-4])*", stages):
            raise ValueError(f"stages {stages}: must be 1-1 to 8-4, with commas between several")
        if not 1 <= size <= 224:
            raise ValueError(f"size {size}: must be 1 to 224")
        check_timing(skip, noop_max)
        path = find_rom(rom)
        if importlib.util.find_spec("stable_retro") is None:
            raise ValueError("env_id SuperMarioBros: needs stable-retro; pip install -r requirements-games.txt")
        import stable_retro

        self.size = size
        self.skip = skip
        self.noop_max = noop_max
        self.practice = practice
        gc.collect()  # frees an earlier emulator that is no longer referenced
        try:
            self.emulator = stable_retro.RetroEmulator(str(path))
        except RuntimeError as error:
            raise ValueError(f"rom {path}: no emulator for it ({error}); a process can hold one only") from error
        self.data = stable_retro.data.GameData()
        self.emulator.configure_data(self.data)
        self.emulator.step()
        # The weights of rows repeat: with size 84 every 8 rows of the screen become 3 rows of the picture.
        self.groups = math.gcd(224, size)
        self.rows = area_weights(224 // self.groups, size // self.groups)
        self.columns = np.ascontiguousarray(area_weights(240, size).T)
        self.luma = np.array([0.299, 0.587, 0.114], np.float32)
        power_on = self.emulator.get_state()
        self.starts = []
        for stage in stages.split(","):
            self.emulator.set_state(power_on)
            self.starts.append(self._boot(path, stage))
        self.level = 0
        self.ends = [deque([0], 64) for _ in self.starts]  # how far the last lost games got, per level
        self.visited = []  # x and the emulator's state after every step of this game
        self.furthest = [[(0, start)] for start in self.starts]  # the same of the game that got furthest, per level
        # Reading the RAM from a saved state takes 2 us; the library's own method takes 80 to 160 us.
        self.ram_at = power_on.index(b"RAM\0\0\x08\0\0") + 8

    def _boot(self, path: Path, level: str) -> bytes:
        """Plays from power-on to the start of a level, about 70 frames.

        Returns the state one frame before the first controllable frame.
        """
        world, stage = map(int, level.split("-"))
        area = stage - 1
        if stage > 1 and world in (1, 2, 4, 7):
            area = stage  # these worlds have an extra area before stage 2
        memory = self.data.memory
        for _ in range(40):
            self._frame(NOTHING)
        start = NOTHING.copy()
        first = b""
        for frame in range(600):
            self.data.update_ram()
            if memory.extract(MODE, "|u1") != 1:
                # Set the level before START is read. Later it would change only the label, not the map.
                memory.assign(WORLD, "|u1", world - 1)
                memory.assign(STAGE, "|u1", stage - 1)
                memory.assign(AREA, "|u1", area)
                start[START_BUTTON] = frame % 2 == 0
                self._frame(start)
            elif memory.extract(TASK, "|u1") == 3 and memory.extract(PLAYER, "|u1") == 8:
                return first
            else:
                memory.assign(TITLE_TIMER, "|u1", 0)
                first = self.emulator.get_state()
                self._frame(NOTHING)
        raise ValueError(f"rom {path}: level {level} did not start within 600 frames")

    def _frame(self, mask: np.ndarray) -> None:
        self.emulator.set_button_mask(mask, 0)
        self.emulator.step()

    def start(self, draw: Stream) -> None:
        """Starts a random level with a random number of no-op frames.

        To practice, it goes on from up to 32 steps before a place where a game was lost, along the furthest game.
        """
        self._remember()
        self.level, noops = divmod(draw(len(self.starts) * (self.noop_max + 1)), self.noop_max + 1)
        if self.practice and draw(1000) < 1000 * self.practice:
            furthest = self.furthest[self.level]
            ends = self.ends[self.level]
            end = ends[draw(len(ends))]
            steps_before = sum(x < end for x, _ in furthest)
            self.visited = furthest[: 1 + max(steps_before - draw(32), 0)]
            self._load(self.visited[-1][1])
            self.play(JUMP if self.ram[FLOAT] else 0, 1)  # draws the picture; a jump goes on
        else:
            self.visited = []
            self.emulator.set_state(self.starts[self.level])
            self.play(0, 1 + noops)  # the first frame is the first controllable one

    def _remember(self) -> None:
        """Keeps the last game up to its furthest step, without its end, if it was won or no game got further."""
        xs = [x for x, _ in self.visited[:-1]]
        if not xs:
            return
        end = max(xs)
        if self.flag or end >= self.furthest[self.level][-1][0]:
            self.furthest[self.level] = self.visited[: 1 + xs.index(end)]
        if not self.flag:
            self.ends[self.level].append(end)

    def play(self, buttons: int, frames: int | None = None) -> None:
        """Presses `buttons` for `frames` (None: `skip`).

        The game jumps only when A is newly pressed, and pictures do not show whether A is still pressed. So for a jump
        from the ground A is released for one frame first: the effect of an action then depends only on what is visible.
        """
        frames = self.skip if frames is None else frames
        if buttons & JUMP and self.ram[FLOAT] == 0 and self.ram[OLD_BUTTONS] & A_BUTTON:
            self._frame(PRESSED[buttons & ~JUMP])
            frames -= 1
        mask = PRESSED[buttons]
        for _ in range(frames):
            self._frame(mask)
        state = self.emulator.get_state()
        self._read_ram(state)
        if self.practice:
            self.visited.append((self.where(), state))

    def _read_ram(self, state: bytes) -> None:
        ram = self.ram = state[self.ram_at : self.ram_at + 2048]
        self.dead = ram[PLAYER] in (0x0B, 6) or ram[BELOW] > 1
        # The level is won at the end of a world, or by sliding down a pole with the flag (0x31) or Bowser (0x2D) near.
        kinds = ram[KINDS : KINDS + 5]
        is_sliding = ram[FLOAT] == 3 and (0x31 in kinds or 0x2D in kinds)
        self.flag = not self.dead and (ram[MODE] == 2 or is_sliding)
        digits = ram[SCORE : SCORE + 6]
        self.score = 10 * int("".join(str(digit) for digit in digits))

    def where(self) -> int:
        """x of the player in pixels."""
        return self.ram[X_PAGE] * 256 + self.ram[X_PIXEL]

    def picture(self, out: np.ndarray) -> None:
        """Draws the screen to `out` (size, size) uint8 in gray: luma, resized by area averaging."""
        pixels = self.emulator.get_screen().reshape(-1, 3)
        gray = pixels.astype(np.float32) @ self.luma
        rows = self.rows @ gray.reshape(self.groups, -1, 240)
        rows = rows.reshape(self.size, 240)
        np.add(rows @ self.columns, 0.5, out=out, casting="unsafe")

    def state(self) -> dict[str, Any]:
        """The complete state of the game: the emulator's saved state as a list of ints."""
        return {"emulator": [*self.emulator.get_state()]}

    def restore(self, state: dict[str, Any]) -> None:
        self._load(bytes(state["emulator"]))

    def _load(self, state: bytes) -> None:
        self.emulator.set_state(state)
        self._read_ram(state)

    def ansi(self) -> str:
        """The screen as 42 x 28 characters by brightness."""
        gray = self.emulator.get_screen().mean(2)
        blocks = gray[:, : 42 * 5].reshape(28, 8, 42, 5)
        brightness = blocks.mean((1, 3)) / 256
        signs = np.array(list(" .:-=+*#%@"))[(brightness * 10).astype(int)]
        return "\n".join("".join(row) for row in signs)

    def rgb(self) -> np.ndarray:
        """The screen at twice its size, (448, 480, 3) uint8."""
        return self.emulator.get_screen().repeat(2, 0).repeat(2, 1)


class SuperMarioBrosBatch(MarioBatch):
    """`MarioBatch` with one lane of `NesGame`, whose keywords it takes. Raises ValueError for more lanes."""

    game_class = NesGame

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        if num_envs != 1:
            raise ValueError(f"num_envs {num_envs}: a process holds one emulator, it must be 1; use more processes")
        super().__init__(num_envs, **settings)


class SuperMarioBrosEnv(MarioEnv):
    """The original game as a Gymnasium environment, with the keywords of `SuperMarioBrosBatch`."""

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 15}
    batch_class = SuperMarioBrosBatch
