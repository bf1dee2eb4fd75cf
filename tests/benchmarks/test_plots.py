"""The pictures."""

import json

from benchmark_helpers import CPU

from benchmarks import plots

GAMES = "score", "hearts", "distance"


def test_pictures_are_drawn_from_the_files(tmp_path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    images = tmp_path / "benchmarks" / "images"
    folder.mkdir()
    plots.draw_all(CPU)
    assert not images.exists()
    rates = {"SnakeBatch": [[1, 9]], "jumanji": [[2, 3]], "rule book, G": [[1]]}
    (folder / "env.json").write_text(json.dumps({"widths": [1, 128], "rates": rates}))
    (folder / "act.json").write_text(json.dumps({"widths": [1, 128], "rates": {"ours": [[1, 9]], "1": [1.0]}}))
    cells = [{"script": script, "flag": "--num-envs", "value": 8} for script in ("dqn_snake.py", "ppo_metta.py")]
    cells[0]["runs"] = [{"env_steps_per_second": 7.0}]
    (folder / "scaling.json").write_text(json.dumps({"cells": cells}))
    for game in GAMES:
        (folder / f"time-to-{game}.json").write_text(json.dumps({"curves": {"ours": [[[1, 2], [3, 4]]]}}))
    (folder / "learn.json").write_text(json.dumps({"runs": [{"flags": "--max-seconds 600", "curve": [[1, 2]]}]}))
    plots.draw_all(CPU)
    pictures = {"throughput.png", "learning.png", *(f"time-to-{game}.png" for game in GAMES)}
    assert {path.name for path in images.glob("*.png")} == pictures
