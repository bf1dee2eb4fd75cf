"""The real Super Mario Bros. (NES) behind the interface of envs/mario/game.py: same actions, reward, ends and pictures.

Needs `stable-retro` and a ROM of your own: `rom=PATH`, or the file that an installed `gym-super-mario-bros` carries. It
drives the emulator core below stable-retro's Gym layer. A process can hold one emulator, so a batch has one lane.
"""

import gc
import importlib.util
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from envs.mario.batch import MarioBatch, MarioEnv
from envs.mario.game import DOWN, JUMP, LEFT, RIGHT, RUN, UP, check_timing
from envs.streams import Stream

BUTTONS = (RUN, 0, 0, 0, UP, DOWN, LEFT, RIGHT, JUMP)  # the core's order: B, none, SELECT, START, four ways, A
START_BUTTON = 3
PRESSED = [np.array([bool(held & button) for button in BUTTONS], np.uint8) for held in range(64)]
NOTHING = PRESSED[0]
# Places in the 2 KiB of RAM.
MODE = 0x770
TASK = 0x772
PLAYER = 0x0E
FLOAT = 0x1D
BELOW = 0xB5
X_PAGE = 0x6D
X_PIXEL = 0x86
KINDS = 0x16  # of the five who move
SCORE = 0x7DD
WORLD = 0x75F
STAGE = 0x75C
AREA = 0x760
TITLE_TIMER = 0x7A0
OLD_BUTTONS = 0x0D  # what of A and B was down in the last frame
A_BUTTON = 0x80  # its bit of A


def find_rom(rom: str | None = None) -> Path:
    """Path of the ROM: the one given, else the one inside an installed gym-super-mario-bros, which is not imported."""
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
    # Dumps differ in a few bytes of graphics and title; the end of the program (a table and the interrupt vectors) is
    # the same in all of them, and in no other game.
    if data[:4] != b"NES\x1a" or zlib.crc32(data[16 + 0x7FF0 : 16 + 0x8000]) != 0xC7BAB0FB:
        raise ValueError(f"rom {path}: not Super Mario Bros. (NES); give the path of a .nes file of that game")
    return path


def area_weights(pixels: int, size: int) -> np.ndarray:
    """(size, pixels) float32: rows that average a line of `pixels` down to `size`, parts of pixels included."""
    edges = np.arange(size + 1) * pixels / size
    pixel = np.arange(pixels)
    first = np.maximum(edges[:-1, None], pixel)
    last = np.minimum(edges[1:, None], pixel + 1)
    overlap = np.maximum(last - first, 0)
    return (overlap * size / pixels).astype(np.float32)


class NesGame:
    """One emulator, with what `MarioBatch` asks of a game (see `MarioGame`).

    `world` 1 to 8 and `stage` 1 to 4 choose the level. A game starts from a saved state of the level's first
    controllable frame, so it costs nothing to begin, and two starts show the same pictures.
    """

    max_steps = 2500  # the game's own clock runs out after some 2,400 steps

    def __init__(
        self,
        rom: str | None = None,
        world: int = 1,
        stage: int = 1,
        size: int = 84,
        skip: int = 4,
        noop_max: int = 30,
    ) -> None:
        if world not in range(1, 9) or stage not in range(1, 5):
            raise ValueError(f"world {world}, stage {stage}: must be 1 to 8 and 1 to 4")
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
        gc.collect()  # an emulator that nobody holds any more may still be waiting to be freed
        try:
            self.emulator = stable_retro.RetroEmulator(str(path))
        except RuntimeError as error:
            raise ValueError(f"rom {path}: no emulator for it ({error}); a process can hold one only") from error
        self.data = stable_retro.data.GameData()
        self.emulator.configure_data(self.data)
        self.emulator.step()
        # Weights of rows repeat: at 84, every 8 rows of the screen make 3 of the picture in the same way.
        self.groups = math.gcd(224, size)
        self.rows = area_weights(224 // self.groups, size // self.groups)
        self.columns = np.ascontiguousarray(area_weights(240, size).T)
        self.luma = np.array([0.299, 0.587, 0.114], np.float32)
        self._boot(path, world, stage)
        # A saved state costs 2 us and holds the RAM; the library's own refresh of it costs 80 to 160.
        self.ram_at = self.first.index(b"RAM\0\0\x08\0\0") + 8

    def _boot(self, path: Path, world: int, stage: int) -> None:
        """From power-on to the first controllable frame of a level, about 70 frames."""
        area = stage if stage > 1 and world in (1, 2, 4, 7) else stage - 1  # these worlds have an extra one before 2
        memory = self.data.memory
        for _ in range(40):
            self._frame(NOTHING)
        start = NOTHING.copy()
        for frame in range(600):
            self.data.update_ram()
            if memory.extract(MODE, "|u1") != 1:
                # The level has to be there before START is read; later it would change the label, not the map.
                memory.assign(WORLD, "|u1", world - 1)
                memory.assign(STAGE, "|u1", stage - 1)
                memory.assign(AREA, "|u1", area)
                start[START_BUTTON] = frame % 2 == 0
                self._frame(start)
            elif memory.extract(TASK, "|u1") == 3 and memory.extract(PLAYER, "|u1") == 8:
                return
            else:
                memory.assign(TITLE_TIMER, "|u1", 0)
                self.first = self.emulator.get_state()  # in the end: one frame before the first controllable one
                self._frame(NOTHING)
        raise ValueError(f"rom {path}: level {world}-{stage} did not start within 600 frames")

    def _frame(self, mask: np.ndarray) -> None:
        self.emulator.set_button_mask(mask, 0)
        self.emulator.step()

    def start(self, draw: Stream) -> None:
        """Back to the start of the level, and a drawn number of frames of nothing."""
        self.emulator.set_state(self.first)
        self.play(0, 1 + draw(self.noop_max + 1))  # the one brings the screen, too, to the first controllable frame

    def play(self, buttons: int, frames: int | None = None) -> None:
        """Hold `buttons` for `frames` (None: `skip`).

        The game starts a jump only at a new press of A, and no picture shows whether A is still down. So where a jump
        is asked for on the ground, A that is down is let go for one frame first: what jumps is what is seen.
        """
        frames = self.skip if frames is None else frames
        if buttons & JUMP and self.ram[FLOAT] == 0 and self.ram[OLD_BUTTONS] & A_BUTTON:
            self._frame(PRESSED[buttons & ~JUMP])
            frames -= 1
        mask = PRESSED[buttons]
        for _ in range(frames):
            self._frame(mask)
        self.ram = self.emulator.get_state()[self.ram_at : self.ram_at + 2048]
        self._read_ram()

    def _read_ram(self) -> None:
        ram = self.ram
        self.dead = ram[PLAYER] in (0x0B, 6) or ram[BELOW] > 1
        # Sliding down a pole, with the flag (0x31) or Bowser (0x2D) among the five who move; or the end of a world.
        sliding = ram[FLOAT] == 3 and any(kind in (0x31, 0x2D) for kind in ram[KINDS : KINDS + 5])
        self.flag = not self.dead and (ram[MODE] == 2 or sliding)
        self.score = 10 * int("".join(str(digit) for digit in ram[SCORE : SCORE + 6]))

    def where(self) -> int:
        """x in pixels."""
        return self.ram[X_PAGE] * 256 + self.ram[X_PIXEL]

    def picture(self, out: np.ndarray) -> None:
        """(size, size) uint8 gray: luma, then the mean over the area of each pixel."""
        gray = self.emulator.get_screen().reshape(-1, 3).astype(np.float32) @ self.luma
        rows = (self.rows @ gray.reshape(self.groups, -1, 240)).reshape(self.size, 240)
        np.add(rows @ self.columns, 0.5, out=out, casting="unsafe")

    def state(self) -> dict[str, Any]:
        """All that this game is: the emulator's saved state as a list of bytes."""
        return {"emulator": [*self.emulator.get_state()]}

    def restore(self, state: dict[str, Any]) -> None:
        self.emulator.set_state(bytes(state["emulator"]))
        self.ram = self.emulator.get_state()[self.ram_at : self.ram_at + 2048]
        self._read_ram()

    def ansi(self) -> str:
        """The screen in 42 x 28 characters, darker to lighter."""
        gray = self.emulator.get_screen().mean(2)
        blocks = gray[:, : 42 * 5].reshape(28, 8, 42, 5)
        brightness = blocks.mean((1, 3)) / 256
        signs = np.array(list(" .:-=+*#%@"))[(brightness * 10).astype(int)]
        return "\n".join("".join(row) for row in signs)

    def rgb(self) -> np.ndarray:
        """(448, 480, 3) uint8: the console's screen, doubled."""
        return self.emulator.get_screen().repeat(2, 0).repeat(2, 1)


class SuperMarioBrosBatch(MarioBatch):
    """`MarioBatch` with one lane, the emulator; `rom`, `world`, `stage` and other keywords as `NesGame` has them."""

    game_class = NesGame

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        if num_envs != 1:
            raise ValueError(f"num_envs {num_envs}: a process holds one emulator, it must be 1; use more processes")
        super().__init__(num_envs, **settings)


class SuperMarioBrosEnv(MarioEnv):
    """The real game as a Gymnasium environment; keywords as `SuperMarioBrosBatch` has them."""

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 15}
    batch_class = SuperMarioBrosBatch
