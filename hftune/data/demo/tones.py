"""Sounds for the demo recipes, made by code, the same on every machine: calls to tell apart, and texts as melodies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hftune.data.demo.drawings import Rng, Row, drawn

RATE = 16_000
"""Samples a second."""
CALLS = ("falling", "level", "pulsed", "rising", "trill", "wave")
LETTERS = {letter: 350.0 * 1.5**place for place, letter in enumerate("adeln")}
"""The tone of each letter, in Hz."""
WORDS = ("add", "ale", "and", "dale", "deal", "den", "dne", "elan", "end", "land", "lane", "lead", "lend", "need")


def _recording(phase_T: np.ndarray, loudness_T: np.ndarray, rng: Rng) -> dict[str, Any]:
    """Return a tone with one overtone and some noise."""
    tone_T = np.sin(phase_T) + rng.uniform(0.1, 0.4) * np.sin(2 * phase_T)
    noise_T = rng.normal(0, 1, len(phase_T)) * rng.uniform(0.01, 0.1)
    samples_T = rng.uniform(0.1, 0.5) * (tone_T * loudness_T + noise_T)
    return {"array": samples_T.astype(np.float32), "sampling_rate": RATE}


def _call(rng: Rng) -> Row:
    name = CALLS[rng.randint(len(CALLS))]
    share_T = np.linspace(0, 1, int(RATE * rng.uniform(0.3, 0.6)))
    low, span, beats = rng.uniform(300, 900), rng.uniform(1.6, 2.6), rng.uniform(4, 7)
    turn_T = 2 * np.pi * (beats * share_T + rng.rand())
    bend_T = {
        **{"falling": 1 - share_T, "rising": share_T, "wave": 0.5 + 0.5 * np.sin(turn_T / 3)},
        **{"trill": (np.sin(turn_T * 1.5) > 0).astype(float)},
    }.get(name, np.full_like(share_T, 0.5))
    loudness_T = (np.sin(turn_T) > 0).astype(float) if name == "pulsed" else np.ones_like(share_T)
    phase_T = 2 * np.pi * np.cumsum(low * span**bend_T) / RATE
    return {"audio": _recording(phase_T, loudness_T, rng), "label": name}


def _melody(rng: Rng) -> Row:
    text = " ".join(WORDS[rng.randint(len(WORDS))] for _ in range(rng.randint(1, 4)))
    tones, loud = [], []
    for letter in f" {text} ":  # each letter a tone, followed by a short pause; a space is a longer one
        lengths = [int(RATE * rng.uniform(0.05, 0.08)), int(RATE * rng.uniform(0.02, 0.03))]
        tones += [np.full(sum(lengths), LETTERS.get(letter, 0.0) * rng.uniform(0.97, 1.03))]
        loud += [np.repeat([float(letter in LETTERS), 0.0], lengths)]
    phase_T = 2 * np.pi * np.cumsum(np.concatenate(tones)) / RATE
    return {"audio": _recording(phase_T, np.concatenate(loud), rng), "text": text}


calls = partial(drawn, _call, 800, 160, kind=1)
"""Calls of six kinds, of 0.3 to 0.6 s: "audio", an array at 16 kHz, and "label", the kind, by how pitch and loudness change.

Pitch, length, loudness, overtone and noise are random.
"""
melodies = partial(drawn, _melody, 800, 100, kind=1)
"""One to three words as melodies of 0.4 to 1.8 s: "audio", an array at 16 kHz, and "text", a tone for each letter."""
