"What `from fastaccum.all import *` brings."
from fastaccum.accumulation import GradientAccumulation
from fastaccum.batchnorm import FreezeBN, RecalibrateBN
from fastaccum.cache import GradientCache
from fastaccum.checkpoint import ActivationCheckpoint
from fastaccum.core.macro_batch import MacroBatch, Position, round_up
from fastaccum.core.notices import TwinWarning
from fastaccum.core.plan import Plan
from fastaccum.noise_scale import NoiseScale
from fastaccum.scaled_lr import ScaledLR
from fastaccum.schedule import GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.core.sizes import Targets, find_size
from fastaccum.twin_check import TwinCheck

__all__ = ['ActivationCheckpoint', 'FreezeBN', 'GradientAccumulation', 'GradientAccumulationSchedule',
           'GradientAccumulationScheduler', 'GradientCache', 'MacroBatch', 'NoiseScale', 'Plan', 'Position',
           'RecalibrateBN', 'ScaledLR', 'Targets', 'TwinCheck', 'TwinWarning', 'find_size', 'round_up']
