"Gradient accumulation for fastai: train on micro-batches, get the big batch's run."
__version__ = "0.1.0"

from fastaccum import accum_find, batchnorm, bs_find, gan, loggers, twin_check
from fastaccum.accumulation import GradientAccumulation
from fastaccum.batchnorm import FreezeBN, RecalibrateBN
from fastaccum.cache import GradientCache
from fastaccum.checkpoint import ActivationCheckpoint
from fastaccum.core.notices import TwinWarning
from fastaccum.noise_scale import NoiseScale
from fastaccum.scaled_lr import ScaledLR
from fastaccum.schedule import GradientAccumulationSchedule, GradientAccumulationScheduler

__all__ = ['ActivationCheckpoint', 'FreezeBN', 'GradientAccumulation', 'GradientAccumulationSchedule',
           'GradientAccumulationScheduler', 'GradientCache', 'NoiseScale', 'RecalibrateBN', 'ScaledLR', 'TwinWarning']
