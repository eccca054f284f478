"fastai's own callback, and fastai without accumulation (for its cost only)."
import torch
from functools import partial
from torch import nn
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import Learner   # with its fit_one_cycle
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import OptimWrapper
from .. import quiet
from .cases import Case, autocast, grad_scaler
from .peer import Peer

class Float32Loss(Callback):
    "fastai's Recorder cannot smooth a loss in double precision"
    order = -100
    def after_loss(self): self.learn.loss = self.learn.loss.float()

class CpuMixedPrecision(MixedPrecision):
    "fastai's switches itself off where there is no GPU"
    def before_fit(self):
        case = Case('', '', amp=self.amp_mode.value)
        self.autocast,self.learn.scaler,self.scales = autocast(case),grad_scaler(case),[]
    @property
    def name(self): return 'mixed_precision'

class CrossEntropy(nn.CrossEntropyLoss):
    "fastai's `CrossEntropyLossFlat` would make double predictions single"
    def forward(self, pred, targ): return super().forward(pred.flatten(0, -2), targ.flatten())

class Fastai(Peer):
    key,title,package = 'fastai','fastai’s callback','fastai'
    docs = 'https://docs.fast.ai/callback.training.html#gradientaccumulation'
    how = 'GradientAccumulation(n_acc)'
    mixed_precision = dict(cpu=CpuMixedPrecision, cuda=MixedPrecision)

    def accumulation(self, micro, accum): return [GradientAccumulation(accum)]

    def start(self, case, model): self.case,self.model,self.learn = case,model,None

    def learner(self, data, micro):
        "The same Learner in each fit, with loaders of its own"
        case = self.case
        train = DataLoader(data.ds, bs=micro) if hasattr(data, 'ds') else data.loader(micro)
        dls = DataLoaders(train, [])
        if self.learn is not None: self.learn.dls = dls
        else:
            if case.amp: cbs = [self.mixed_precision[case.device](case.amp)]
            else: cbs = [Float32Loss()] if case.dtype is torch.float64 else []
            self.learn = quiet(Learner(dls, self.model, CrossEntropy(), lr=case.lr, moms=(case.mom,)*3, cbs=cbs,
                opt_func=partial(OptimWrapper, opt=torch.optim.SGD, momentum=case.mom)))
        return self.learn

    def fit(self, data, epochs, micro, accum):
        case,learn = self.case,self.learner(data, micro)
        cbs = self.accumulation(micro, accum) if micro!=accum or case.kind=='fast' else []
        if case.clip: cbs.append(GradientClip(case.clip))
        if case.cycle: learn.fit_one_cycle(epochs, case.lr, wd=0., cbs=cbs)
        else: learn.fit(epochs, case.lr, wd=0., cbs=cbs)

    def losses(self): return [float(o) for o in self.learn.recorder.losses]
    def recorded_as(self, losses):
        "fastai's Recorder smooths"
        res,mean = [],0.
        for i,o in enumerate(losses):
            mean = .98*mean+.02*o
            res.append(mean/(1-.98**(i+1)))
        return res

class Plain(Fastai):
    "fastai without accumulation: steps on each micro-batch"
    key,title,how = 'fastai-plain','fastai, no accumulation','a step on each micro-batch'
    def accumulation(self, micro, accum): return []

peers = [Fastai]
