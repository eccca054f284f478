"""Exact gradient accumulation for fastai: train on micro-batches, get the result of the large batch.

Often, memory has room only for a small batch. With `GradientAccumulation(256)`, the model sees the small
batches of your DataLoaders (the micro-batches), and the optimizer takes a step every 256 samples.
Weights, learning rates, recorded losses and metrics are those of a run whose DataLoaders have batches of
256 samples (the full-batch run). If something makes the two runs differ, such as BatchNorm, a warning
gives the remedy.

A complete example, with micro-batches of 16 samples and steps of 64:

    import torch
    from fastai.vision.all import *
    from fastaccum import GradientAccumulation   # after fastai's star: it has a class of the same name

    x = torch.randn(512, 8)
    items = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders(DataLoader(items, bs=16, shuffle=True), DataLoader(items, bs=64))
    learn = Learner(dls, nn.Linear(8, 1), MSELossFlat())
    learn.fit_one_cycle(5, 0.1, cbs=GradientAccumulation(64))
    print(learn.accum_check(64))   # a table: is this the run on the large batch, and if not, why?

Accumulate (callbacks for `cbs=`):
    GradientAccumulation            take an optimizer step every `accum_bs` samples
    GradientAccumulationSchedule    anneal the size of the steps while training
    GradientAccumulationScheduler   change the number of micro-batches in a step at given epochs or steps
    AutoSize                        split batches when memory runs out, with a split function of your own
    TokenBudget                     split batches of texts into micro-batches of at most so many tokens

Other ways to the large batch (callbacks for `cbs=`):
    GradientCache                   the model sees micro-batches, the loss sees the loader's whole batch
    ActivationCheckpoint            the model sees the whole batch; activations are computed again
    FreezeBN, RecalibrateBN         freeze BatchNorm's statistics, or estimate them on large batches

Choose batch sizes and learning rates (callbacks for `cbs=`):
    NoiseScale                      measure while training how large a batch should be
    ScaledLR                        scale the learning rate with the size of a step

Methods that every Learner gets with `import fastaccum`:
    learn.accum_check               compare with the run on the large batch, and explain a difference
    learn.bs_find                   find the largest micro-batch that fits into memory
    learn.accum_find                suggest the number of samples in a step
    learn.recalibrate_bn            estimate BatchNorm's statistics again, once

Warnings that the result differs, or may differ:
    AccumulationWarning             the class of all these warnings, for `warnings.filterwarnings`
    BatchNormWarning, LoaderWarning, LossWarning, StateWarning      subclasses, one for each cause
    ImportOrderWarning              a fit uses fastai's `GradientAccumulation` instead of this one

Documentation: https://fastaccum.github.io/fastaccum
"""
__version__ = "0.3.0"

from fastaccum import accum_find, batchnorm, bs_find, accum_check
from fastaccum.accumulation import GradientAccumulation
from fastaccum.batchnorm import FreezeBN, RecalibrateBN
from fastaccum.cache import GradientCache
from fastaccum.checkpoint import ActivationCheckpoint
from fastaccum.core import import_order
from fastaccum.core.micro_batches import AutoSize
from fastaccum.core.warnings import (AccumulationWarning, BatchNormWarning, ImportOrderWarning,
    LoaderWarning, LossWarning, StateWarning)
from fastaccum.noise_scale import NoiseScale
from fastaccum.scaled_lr import ScaledLR
from fastaccum.schedule import GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.token_budget import TokenBudget

__all__ = ['AccumulationWarning', 'ActivationCheckpoint', 'AutoSize', 'BatchNormWarning', 'FreezeBN',
    'GradientAccumulation', 'GradientAccumulationSchedule', 'GradientAccumulationScheduler',
    'GradientCache', 'ImportOrderWarning', 'LoaderWarning', 'LossWarning', 'NoiseScale', 'RecalibrateBN',
    'ScaledLR', 'StateWarning', 'TokenBudget']
