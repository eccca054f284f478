"Gradient accumulation for fastai: train on micro-batches, get the big batch's run."
__version__ = "0.1.0"

from fastaccum import accum_find, bs_find, gan, loggers, twin_check
from fastaccum.accumulation import GradientAccumulation
from fastaccum.core.notices import TwinWarning
from fastaccum.noise_scale import NoiseScale
from fastaccum.scaled_lr import ScaledLR
from fastaccum.schedule import GradientAccumulationSchedule, GradientAccumulationScheduler

__all__ = ['GradientAccumulation', 'GradientAccumulationSchedule', 'GradientAccumulationScheduler', 'NoiseScale', 'ScaledLR',
           'TwinWarning']
