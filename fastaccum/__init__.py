"Gradient accumulation for fastai: train on small batches, take the steps of a large one."
__version__ = "0.2.0"

from fastaccum import accum_find, batchnorm, bs_find, accum_check
from fastaccum.core import import_order
from fastaccum.accumulation import GradientAccumulation
from fastaccum.batchnorm import FreezeBN, RecalibrateBN
from fastaccum.cache import GradientCache
from fastaccum.checkpoint import ActivationCheckpoint
from fastaccum.core.micro_batches import AutoSize
from fastaccum.core.warnings import (AccumulationWarning, BatchNormWarning, ImportOrderWarning, LoaderWarning,
    LossWarning, StateWarning)
from fastaccum.noise_scale import NoiseScale
from fastaccum.scaled_lr import ScaledLR
from fastaccum.schedule import GradientAccumulationSchedule, GradientAccumulationScheduler

__all__ = ['AccumulationWarning', 'ActivationCheckpoint', 'AutoSize', 'BatchNormWarning', 'FreezeBN',
           'GradientAccumulation', 'GradientAccumulationSchedule', 'GradientAccumulationScheduler', 'GradientCache',
           'ImportOrderWarning', 'LoaderWarning', 'LossWarning', 'NoiseScale', 'RecalibrateBN', 'ScaledLR',
           'StateWarning']
