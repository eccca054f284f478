"fastxtend 0.1.7, which runs on today's fastai when its wheel is installed without what it asks for."
from fastxtend.callback.amp import MixedPrecision
from fastxtend.callback.gradaccum import GradientAccumulation
from .fastai import CpuMixedPrecision, Fastai

class Scaled(MixedPrecision): before_fit,name = CpuMixedPrecision.before_fit,CpuMixedPrecision.name

# Not run: log_accum_batch=False. It leaves the Recorder alone, so the learning rate finder runs and, with
# drop_last=False, training metrics are exact; but then steps, and what is recorded, are those of fastai's callback.
class Fastxtend(Fastai):
    key,title,package = 'fastxtend','fastxtend','fastxtend'
    docs = 'https://fastxtend.benjaminwarner.dev/callback.gradaccum.html'
    how = 'GradientAccumulation(accum_bs), with its default drop_last=True'
    mixed_precision = dict(cpu=Scaled, cuda=MixedPrecision)
    def accumulation(self, micro, accum): return [GradientAccumulation(accum, micro_batch_size=micro)]

class KeepLast(Fastxtend):
    key,title,how = 'fastxtend-keep','fastxtend, drop_last=False','GradientAccumulation(accum_bs, drop_last=False)'
    def accumulation(self, micro, accum): return [GradientAccumulation(accum, micro_batch_size=micro, drop_last=False)]

peers = [Fastxtend, KeepLast]
