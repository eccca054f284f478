"""Exact gradient accumulation for fastai: train on micro-batches and get the result of a large batch.

Use fastaccum when the batch size that you want does not fit in memory. With `GradientAccumulation(256)`,
the model trains on the small batches of your DataLoaders (the micro-batches), and the optimizer takes a
step every 256 samples. Weights, learning rates, recorded losses and metrics match a run whose
DataLoaders have `bs=256` (the full-batch run), up to rounding error. fastaccum warns you about the most
common causes of a difference, such as BatchNorm, and suggests a fix.

This complete example uses micro-batches of 16 samples and steps of 64:

    import torch
    from fastai.vision.all import *
    from fastaccum import GradientAccumulation   # import it last: fastai has a class of the same name

    x = torch.randn(512, 8)
    items = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders(DataLoader(items, bs=16, shuffle=True), DataLoader(items, bs=64))
    learn = Learner(dls, nn.Linear(8, 1), MSELossFlat())
    learn.fit_one_cycle(5, 0.1, cbs=GradientAccumulation(64))
    print(learn.accum_check(64))   # a table: whether this matches the full-batch run, and if not, why

Accumulate gradients (callbacks for `cbs=`):
    GradientAccumulation            take an optimizer step every `accum_bs` samples
    GradientAccumulationSchedule    change the effective batch size gradually during training
    GradientAccumulationScheduler   change the number of micro-batches per step at given epochs or steps

Split batches into micro-batches (values for `micro_batch_size=`):
    AutoSize                        split when memory runs out, with your own split function
    TokenBudget                     split batches of texts by length, with a maximum number of tokens

Train on large batches in other ways (callbacks for `cbs=`):
    GradientCache                   run the model on micro-batches and the loss on the whole batch
    ActivationCheckpoint            run the model on the whole batch, and recompute activations
    FreezeBN, RecalibrateBN         freeze BatchNorm's statistics, or re-estimate them on large batches

Choose batch sizes and learning rates (callbacks for `cbs=`):
    NoiseScale                      measure during training how large a batch should be
    ScaledLR                        scale the learning rate with the effective batch size

Methods that `import fastaccum` adds to every Learner:
    learn.accum_check               compare with the full-batch run, and explain any difference
    learn.bs_find                   find the largest batch size that fits in memory
    learn.accum_find                suggest an effective batch size
    learn.recalibrate_bn            re-estimate BatchNorm's statistics once

Warnings that the result differs, or may differ, from the full-batch run:
    AccumulationWarning             base class of these warnings, for `warnings.filterwarnings`
    BatchNormWarning, LoaderWarning, LossWarning, StateWarning      subclasses, one for each cause
    ImportOrderWarning              a fit uses fastai's `GradientAccumulation` instead of fastaccum's

Documentation: https://fastaccum.github.io/fastaccum
"""
__version__ = "0.4.1.dev0"

from fastaccum import accum_find, batchnorm, bs_find, accum_check
from fastaccum.accumulation import GradientAccumulation
from fastaccum.batchnorm import FreezeBN, RecalibrateBN
from fastaccum.cache import GradientCache
from fastaccum.checkpoint import ActivationCheckpoint
from fastaccum.base.messages import (AccumulationWarning, BatchNormWarning, ImportOrderWarning,
    LoaderWarning, LossWarning, StateWarning)
from fastaccum.step.split import AutoSize
from fastaccum.noise_scale import NoiseScale
from fastaccum.scaled_lr import ScaledLR
from fastaccum.schedule import GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.token_budget import TokenBudget

__all__ = ['AccumulationWarning', 'ActivationCheckpoint', 'AutoSize', 'BatchNormWarning', 'FreezeBN',
    'GradientAccumulation', 'GradientAccumulationSchedule', 'GradientAccumulationScheduler',
    'GradientCache', 'ImportOrderWarning', 'LoaderWarning', 'LossWarning', 'NoiseScale', 'RecalibrateBN',
    'ScaledLR', 'StateWarning', 'TokenBudget']
