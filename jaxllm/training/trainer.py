"""A training run, from its current state to its end.

    prepare   make a tokenizer and token ids from text, once
    restore   load the latest checkpoint, or make first weights
    loop      run a compiled step on a batch, log; at intervals evaluate and save a checkpoint
    export    write the weights as a model directory

A killed run resumes from its last checkpoint. Unless the run ends by time, the resumed run gets
exactly the same weights as an uninterrupted one.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import refused
from jaxllm.logging import init_logger
from jaxllm.models.architecture import read_architecture
from jaxllm.training.bigrams import fit_embeddings
from jaxllm.training.export import export, hf_config
from jaxllm.training.forward import RowModel
from jaxllm.training.objective import distance, surprise
from jaxllm.training.optimizer import TABLES, make_optimizer
from jaxllm.training.options import TrainOptions
from jaxllm.training.prepare import (
    load_base,
    load_initial_weights,
    load_teacher,
    prepare_data,
)
from jaxllm.training.run_state import Checkpoints, Log
from jaxllm.training.schedule import Schedule
from jaxllm.training.tokenizer import load_tokenizer
from jaxllm.training.tokens import Batches, heldout_rows

logger = init_logger(__name__)

Weights = dict[str, jax.Array]

# Estimates of the longest end of a run: on a slow disk, with two copies of the state.
_WRITE_S = 3.0
_WRITE_BYTES_PER_S = 50e6


class TrainState(NamedTuple):
    weights: Weights  # float32
    optimizer: Any


class Trainer:
    """A run in its output folder."""

    def __init__(self, options: TrainOptions):
        self._began = time.monotonic()
        options.validate()
        self.options = options
        self.folder = Path(options.output)
        options.keep()
        self._tokenizer_folder = self.folder / "tokenizer"
        data, base = options.data, options.adapter.lora
        if base is not None and data.tokenizer is None:
            data = dataclasses.replace(data, tokenizer=base)
        self.data = prepare_data(data, self._tokenizer_folder, self.folder / "data")
        self.adapter = None
        if base is None:
            vocab_size = load_tokenizer(self._tokenizer_folder).get_vocab_size()
            self.config = hf_config(options.shape, vocab_size)
            self.model = RowModel(read_architecture(self.config))
        else:
            self.adapter = load_base(options.adapter, base, self._tokenizer_folder)
            self.config, self.model = self.adapter.config, self.adapter
        # Weights that are used and not trained.
        self._frozen: Weights = {} if self.adapter is None else self.adapter.frozen
        teacher = options.teacher.teacher
        self.teacher = None if teacher is None else load_teacher(teacher, self._tokenizer_folder)
        run = options.run
        self.schedule = Schedule(
            steps=run.steps,
            seconds=None if run.minutes is None else 60 * run.minutes,
            learning_rate=run.learning_rate,
            warmup_steps=run.warmup_steps,
            decay_share=run.decay_share,
        )
        self.optimizer = make_optimizer(
            weight_decay=run.weight_decay,
            max_grad_norm=run.max_grad_norm,
            table_rate=run.table_rate,
        )
        self._step = jax.jit(self._take_step, donate_argnums=0)
        self._row_surprise = jax.jit(self._surprise)

    def run(self) -> Path:
        """Train to the end; return the folder of the exported model."""
        run = self.options.run
        batches = Batches(
            self.data.train, batch_size=run.batch_size, context=run.context, seed=run.seed
        )
        checkpoints = Checkpoints(self.folder / "checkpoints", run.keep_checkpoints)
        restored = checkpoints.restore(self._abstract_state())
        if restored is not None:
            logger.info("going on after step %d", restored.step)
        step, seconds, state = restored or (0, 0.0, self._initial_state())
        fixed = (self._frozen, {} if self.teacher is None else self.teacher.weights)
        # The whole time of this process counts.
        started = self._began - seconds
        seconds = time.monotonic() - started
        schedule = self._with_time_to_end(state)
        if step == 0 and schedule.progress(step, seconds) == 1:
            raise refused(
                "minutes",
                run.minutes,
                f"they would be over before the first step: it took {seconds:.0f} s to prepare, "
                "which is kept; give more",
            )
        log = Log(self.folder / "log.jsonl", first_step=step)
        while schedule.progress(step, seconds) < 1:
            rate = schedule.rate(step, seconds)
            state, losses = self._step(state, fixed, batches.at(step), rate)
            step += 1
            record = {"step": step} | {name: float(loss) for name, loss in losses.items()}
            seconds = time.monotonic() - started
            done = schedule.progress(step, seconds) == 1
            if not math.isfinite(record["loss"]):
                raise refused(
                    "learning_rate",
                    run.learning_rate,
                    f"the loss of step {step} is no number; go on with a lower one",
                )
            if done or step % run.eval_steps == 0:
                record["heldout_bits_per_byte"] = self.bits_per_byte(state.weights, run.eval_rows)
                logger.info(
                    "step %d, %.0f%% done, epoch %.2f: loss %.3f, held out %.3f bits per byte",
                    step,
                    100 * schedule.progress(step, seconds),
                    batches.epoch(step),
                    record["loss"],
                    record["heldout_bits_per_byte"],
                )
            log.write(**record, learning_rate=rate, seconds=round(seconds, 2))
            if done or step % run.save_steps == 0:
                checkpoints.save(step, seconds, state)
        checkpoints.close()
        log.close()
        return self._export(state.weights)

    def _with_time_to_end(self, state: TrainState) -> Schedule:
        """A schedule that ends earlier, so that the evaluation, the checkpoint and the export after
        the last step are within the given time."""
        if self.schedule.seconds is None:
            return self.schedule
        run = self.options.run
        self.bits_per_byte(state.weights, run.batch_size)  # compiles
        start = time.monotonic()
        self.bits_per_byte(state.weights, run.batch_size)
        num_rows = len(heldout_rows(self.data.heldout, run.context))
        num_batches = math.ceil(min(num_rows, run.eval_rows) / run.batch_size)
        measuring = (time.monotonic() - start) * num_batches
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        kept = measuring + _WRITE_S + num_bytes / _WRITE_BYTES_PER_S
        return dataclasses.replace(self.schedule, seconds=max(1e-3, self.schedule.seconds - kept))

    def export_latest(self) -> Path:
        """Write the model of the latest checkpoint."""
        checkpoints = Checkpoints(self.folder / "checkpoints", self.options.run.keep_checkpoints)
        restored = checkpoints.restore(self._abstract_state())
        checkpoints.close()
        if restored is None:
            raise refused("output", str(self.folder), "it has no checkpoint yet")
        return self._export(restored.state.weights)

    def bits_per_byte(self, weights: Weights, max_rows: int | None = None) -> float:
        """Bits per byte of the held-out text, in independent windows of the context: of up to
        `max_rows` windows, evenly spaced."""
        run = self.options.run
        rows = heldout_rows(self.data.heldout, run.context)
        if max_rows is not None and len(rows) > max_rows:
            rows = rows[np.linspace(0, len(rows) - 1, max_rows).astype(int)]
        # All calls have one shape; rows of padding add nothing to the sum.
        missing = -len(rows) % run.batch_size
        rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=-1)
        nats = num_tokens = 0.0
        for first in range(0, len(rows), run.batch_size):
            some = rows[first : first + run.batch_size]
            nats += float(np.sum(self._row_surprise(weights, self._frozen, some)))
            num_tokens += int(np.sum(some[:, 1:] >= 0))
        tokens_per_byte = (len(self.data.heldout) - 1) / self.data.heldout_bytes
        return nats / num_tokens * tokens_per_byte / math.log(2)

    def _initial_state(self) -> TrainState:
        run = self.options.run
        if run.initial_model is not None:
            assert isinstance(self.model, RowModel), "an adapter has a base"
            weights = load_initial_weights(run.initial_model, self.model, self._tokenizer_folder)
        else:
            weights = self.model.initial_weights(run.seed)
            if run.bigram_steps and self.adapter is None:
                logger.info("fitting first embeddings to bigrams")
                tables = fit_embeddings(
                    self.data.train,
                    self.config["vocab_size"],
                    self.options.shape.hidden_size,
                    steps=run.bigram_steps,
                    seed=run.seed,
                )
                weights |= dict(zip(TABLES, tables, strict=True))
        return TrainState(weights, self.optimizer.init(weights))

    def _abstract_state(self) -> TrainState:
        """The structure of a state, to restore one."""
        weights: Any = {
            name: jax.ShapeDtypeStruct(p.shape, jnp.float32)
            for name, p in self.model.parameters.items()
        }
        return TrainState(weights, jax.eval_shape(self.optimizer.init, weights))

    def _take_step(
        self, state: TrainState, fixed: tuple[Weights, Weights], rows: jax.Array, rate: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Make one update; return the losses before it."""
        gradients = jax.value_and_grad(self._losses, has_aux=True)
        (_, losses), gradient = gradients(state.weights, fixed, rows)
        directions, optimizer = self.optimizer.update(gradient, state.optimizer, state.weights)
        weights = jax.tree.map(lambda w, d: w - rate * d, state.weights, directions)
        return TrainState(weights, optimizer), losses

    def _losses(
        self, weights: Weights, fixed: tuple[Weights, Weights], rows: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and its parts, in nats per token."""
        inputs, targets = rows[:, :-1], rows[:, 1:]
        frozen, teacher_weights = fixed
        logits = self.model.logits(frozen | weights, inputs)
        loss = jnp.mean(surprise(logits, targets))
        if self.teacher is None:
            return loss, {"loss": loss}
        options = self.options.teacher
        taught = self.teacher.model.logits(teacher_weights, inputs)
        apart = jnp.mean(distance(logits, taught, options.temperature))
        share = options.teacher_weight
        return (1 - share) * loss + share * apart, {"loss": loss, "teacher_distance": apart}

    def _surprise(self, weights: Weights, frozen: Weights, rows: jax.Array) -> jax.Array:
        """Surprise in nats at the targets of rows [n, length + 1], without padding."""
        logits = self.model.logits(frozen | weights, jnp.maximum(rows[:, :-1], 0))
        return surprise(logits, rows[:, 1:])

    def _export(self, weights: Weights) -> Path:
        if self.adapter is not None:
            folder = self.folder / "adapter"
            self.adapter.export(folder, weights)
            return folder
        assert isinstance(self.model, RowModel)
        folder = self.folder / "model"
        export(folder, self.model, weights, self.config, self._tokenizer_folder)
        return folder
