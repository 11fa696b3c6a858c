"""Training: AdamW, a learning rate that rises and falls, batches drawn beforehand. Nothing waits for a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from experiments.shakespeare.model import GPT, precision
from experiments.shakespeare.sizes import Sizes
from experiments.shakespeare.text import at

RATE, LEAST_RATE = 1e-3, 1e-4
BETAS, DECAY, LARGEST_GRADIENT = (0.9, 0.99), 0.1, 1.0
EAGER_STEPS = 3
"""before a step is captured: kernels are compiled, and tables made, by then"""
TIMED = 20
"""Steps that the time of one is the mean of."""


class Trainer:
    """A model, its optimizer and the windows that it will read, the same for every method."""

    def __init__(self, model: GPT, train: Tensor, sizes: Sizes, seed: int, captured: bool) -> None:
        self.model, self.train, self.sizes, self.captured = model, train, sizes, captured
        device = train.device
        order = torch.Generator().manual_seed(seed)
        shape = (sizes.iterations, sizes.batch)
        self.starts = torch.randint(len(train) - sizes.context, shape, generator=order).to(device)
        self.rates = torch.tensor([rate(i, sizes) for i in range(sizes.iterations)], device=device)
        decayed, others = [], []
        for parameter in model.parameters():
            (decayed if parameter.dim() == 2 else others).append(parameter)
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        # The rate is a tensor, so that a captured step reads the one of its iteration.
        self.optimizer = torch.optim.AdamW(
            groups, torch.tensor(RATE, device=device), BETAS, fused=True, capturable=device.type == "cuda"
        )
        self.now = self.starts[0].clone()
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, iteration: int) -> None:
        self.now.copy_(self.starts[iteration])
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.rates[iteration])
        if not self.captured:
            self.update()
            return
        if self.graph is None and iteration >= EAGER_STEPS:
            self.graph = self.capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.update_aside()

    def update(self) -> None:
        """Gradients of one batch, and a step along them."""
        self.optimizer.zero_grad(set_to_none=True)
        with precision(self.train.device):
            loss = self.model.loss(at(self.train, self.now, self.sizes.context))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()

    def update_aside(self) -> None:
        """The same on another stream, as what is captured later wants it."""
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self.update()
        here.wait_stream(aside)

    def capture(self) -> torch.cuda.CUDAGraph:
        """`update` as a graph: replayed, it does the same with what is in `now` and in the learning rate by then."""
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.update()
        return graph

    def seconds(self, step: Callable[[], None]) -> float:
        """Of a `step`, which is `update` or the replay of the graph, after some that do not count.

        They all read the batch that was read last: the model is of no use afterwards.
        """
        since = 0.0
        for number in range(EAGER_STEPS + TIMED):
            if number == EAGER_STEPS:
                self.wait()
                since = time.perf_counter()
            step()
        self.wait()
        return (time.perf_counter() - since) / TIMED

    def wait(self) -> None:
        if self.train.is_cuda:
            torch.cuda.synchronize(self.train.device)


def rate(iteration: int, sizes: Sizes) -> float:
    """Up in a line, then down along a cosine to a tenth."""
    if iteration < sizes.warm_up:
        return RATE * (iteration + 1) / (sizes.warm_up + 1)
    done = (iteration - sizes.warm_up) / max(1, sizes.iterations - sizes.warm_up)
    return LEAST_RATE + (RATE - LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2
