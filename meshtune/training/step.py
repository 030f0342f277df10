"""One optimizer step, and one validation pass: the same numbers however the batch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.data.batch import Batch
from meshtune.errors import TrainingError
from meshtune.layout import Layout
from meshtune.models.causal_lm import CausalLM
from meshtune.optim.grad_norm import clip_grad_norm_
from meshtune.optim.in_backward import InBackward
from meshtune.parallel import Objective, Parallel
from meshtune.training.guard import ACTIONS, Guard, Verdict
from meshtune.training.loss_scale import LossScale
from meshtune.training.requests import Requests

_LARGEST_EXPONENT = 700.0  # of which a float64 still holds the exponential


@dataclass
class StepResult:
    """Global figures of one optimizer step; tensors are 0-d, on the device. `seconds` includes reading the batch, which took
    `data_wait` of them.

    Of a step that was not taken, `verdict` says why, and `rows` what it would have been trained on.
    """

    loss: Tensor
    loss_sum: Tensor
    grad_norm: Tensor
    tokens: int
    supervised_tokens: int
    requests: Requests = field(default_factory=Requests)
    seconds: float = 0.0
    data_wait: float = 0.0
    metrics: dict[str, Tensor | float] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    rows: list[int | str] = field(default_factory=list)


class TrainStep:
    """Forward, backward, norm, clip, update over the micro-batches of one global batch."""

    def __init__(
        self,
        parallel: Parallel,
        model: CausalLM,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        device: torch.device,
        max_grad_norm: float | None,
        seed: int,
        requests: Callable[[], Requests] = Requests,
        guard: Guard | None = None,
        loss_scale: LossScale | None = None,
    ):
        """`requests` says what this rank asks of the loop; `guard` judges each step (default: what is not finite stops);
        `loss_scale` is needed where `parallel` computes in float16."""
        self.parallel, self.model, self.objective, self.optimizer = parallel, model, objective, optimizer
        self.layout, self.device, self.max_grad_norm, self.seed = layout, device, max_grad_norm, seed
        self.requests, self.guard, self.loss_scale = requests, guard or Guard(), loss_scale

    def __call__(self, batches: Sequence[Batch], step: int, learning_rate: float) -> StepResult:
        """Train on this rank's `batches` of 0-based optimizer step `step`, unless the guard finds it bad: then no weight and no
        moment changes. Raises TrainingError where that ends the run."""
        supervised, tokens, requests = self._totals(batches)
        if known := self.guard.known_bad(step + 1):
            nothing = torch.zeros((), device=self.device)
            return StepResult(
                nothing, nothing, nothing, tokens, supervised, requests, verdict=Verdict("skip", f"{known}, earlier")
            )
        if supervised == 0:
            raise TrainingError(
                f"step {step + 1}: no token of the global batch is supervised, so there is no loss to train on"
            )
        seed_ranks(self.seed, step, random_stream(self.layout))
        self._set_rates(step, learning_rate)
        scale = None if self.loss_scale is None else self.loss_scale.value
        own = [batch.to(self.device) for batch in batches]
        loss_sum = total_loss(self.parallel.train(self.objective, own, 1 / supervised, scale), self.layout)
        norm = self.parallel.grad_norm(self._parameters(), self._freed).to(self.device) / (scale or 1.0)
        result = StepResult(loss_sum / supervised, loss_sum, norm, tokens, supervised, requests)
        result.metrics.update(self.parallel.metrics)
        result.verdict = self._judge(result, step)
        if result.verdict.action == "accept":
            clip_grad_norm_(self._parameters(), self.max_grad_norm, norm, scale or 1.0)
            self.optimizer.step()
        if self.loss_scale is not None and scale is not None:
            result.metrics.update(loss_scale=scale, overflows=self.loss_scale.overflows)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _set_rates(self, step: int, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
            group["train_step"] = step

    @property
    def _freed(self) -> Mapping[nn.Parameter, Tensor]:
        """Norms of the gradients that an optimizer has used up in the backward."""
        return self.optimizer.norms if isinstance(self.optimizer, InBackward) else {}

    def _totals(self, batches: Sequence[Batch]) -> tuple[int, int, Requests]:
        """Supervised and real tokens of the global batch, and what was asked of the loop, in one reduction."""
        local = [sum(b.supervised_tokens for b in batches), sum(b.tokens for b in batches)]
        if not self.layout.counts_rows:
            local = [0, 0]
        totals = torch.tensor([*local, *self.requests()], dtype=torch.int64, device=self.device)
        dist.all_reduce(totals, group=self.layout.group("world"))
        supervised, tokens, *requests = (int(n) for n in totals.tolist())
        return supervised, tokens, Requests(*requests)

    def _judge(self, result: StepResult, step: int) -> Verdict:
        """The guard's verdict, which every rank shares, noted. Raises TrainingError where it is to stop."""
        loss, norm = torch.stack([result.loss.float(), result.grad_norm.float()]).tolist()
        if self.loss_scale is not None and self.loss_scale.overflowed(loss, norm):
            verdict = Verdict("rescale", f"gradients overflowed at a loss scale of {self.loss_scale.value:g}")
        else:
            verdict = self.guard.judge(loss, norm)
        if self.guard.forgives or self.loss_scale is not None:
            strictest = torch.tensor(ACTIONS.index(verdict.action), device=self.device)
            dist.all_reduce(strictest, dist.ReduceOp.MAX, group=self.layout.group("world"))
            action = ACTIONS[int(strictest)]
            if action != verdict.action:
                verdict = Verdict(action, verdict.reason or "the figures of another rank are not finite")
        if verdict.action == "stop":
            raise TrainingError(
                f"step {step + 1}: {verdict.reason}; {self._where()}. Lower training.learning_rate, lengthen the "
                "warm-up, or look at the rows of this step"
            )
        if verdict.action == "accept":
            self.guard.took(loss)
            if self.loss_scale is not None:
                self.loss_scale.took()
        elif verdict.action == "rescale":
            assert self.loss_scale is not None
            self.loss_scale.lower()
        else:
            self.guard.found_bad(step + 1, verdict.reason)
        return verdict

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _where(self) -> str:
        if self._freed:
            return "weights were changed in the backward (optimizer.in_backward): go on from a checkpoint"
        names = [name for name, p in self.model.model.named_parameters() if p.grad is not None and not _finite(p.grad)]
        found = f"; first gradients that are not finite on this rank: {', '.join(names[:3])}" if names else ""
        return f"no weight was changed by this step{found}"


def _finite(gradient: Tensor) -> bool:
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return bool(torch.isfinite(local).all())


def random_stream(layout: Layout) -> int:
    """Which random numbers a rank draws: its own where it has other tokens or other layers, those of its peers where, cut by
    tensor parallelism alone, both hold the same activations."""
    return layout.rank("pp") * layout.size("loss") + layout.rank("loss")


def seed_ranks(seed: int, step: int, rank: int) -> None:
    """Random numbers of a step follow from seed, step and rank alone, so a resumed run draws what it would have drawn."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)  # any seed fits


@torch.no_grad()
def validate(
    parallel: Parallel,
    model: CausalLM,
    objective: Objective,
    batches: Iterable[list[Batch]],
    layout: Layout,
    device: torch.device,
) -> dict[str, float | int]:
    """`loss` (token-weighted), `perplexity` (its exponential), `token_accuracy` and `tokens` (supervised ones) over every row
    of `batches` (this rank's share of each), whatever the batch size or world.

    `objective` gives, in the place of a loss sum, [2]: the loss sum and how many tokens are the likeliest ones."""
    was_training = model.training
    model.eval()
    count, scores = 0, torch.zeros(2, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    for batch in (batch.to(device) for share in batches for batch in share):
        scores += parallel.evaluate(objective, batch)
        count += batch.supervised_tokens
    model.train(was_training)
    counted = torch.tensor(count if layout.counts_rows else 0, dtype=torch.int64, device=device)
    dist.all_reduce(counted, group=layout.group("world"))
    if counted == 0:
        raise TrainingError("validation: no token of the validation rows is supervised")
    loss, accuracy = (total_loss(scores, layout) / counted).tolist()
    perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    return {"loss": loss, "perplexity": perplexity, "token_accuracy": accuracy, "tokens": int(counted)}


def total_loss(loss_sum: Tensor, layout: Layout) -> Tensor:
    """Loss sums (any shape) over all ranks, of which those that differ in tp alone have computed the same."""
    own = loss_sum if layout.rank("tp") == 0 else torch.zeros_like(loss_sum)
    dist.all_reduce(own, group=layout.group("world"))
    return own
