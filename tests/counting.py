"""Callbacks written for plain fastai that count batches, read `learn.iter` or cancel a batch.

On the full-batch run and on micro-batches, they do the same, because the Learner's batch is the step.
"""
import torch
from fastai.callback.core import Callback, CancelBatchException
from common import CallAt

class Trains(Callback):
    "A callback that is not called in validation"
    run_valid = False

class OwnSchedule(Trains):
    "Sets the learning rate by the number of batches so far, which it counts in `after_batch`"
    def before_fit(self): self.n = 0
    def before_batch(self): self.opt.set_hyper('lr', 0.1/(1+self.n))
    def after_batch(self): self.n += 1

class MovingAverage(Trains):
    "Replaces the weights after the fit by their moving average, which it updates in `after_batch`"
    def before_fit(self): self.average = [p.detach().clone() for p in self.model.parameters()]
    def before_batch(self): self.decay = 0.9
    def after_batch(self):
        for a,p in zip(self.average, self.model.parameters()): a.lerp_(p.detach(), 1-self.decay)
    def after_fit(self):
        with torch.no_grad():
            for a,p in zip(self.average, self.model.parameters()): p.copy_(a)

class PenaltyInEverySecondBatch(Trains):
    def after_loss(self):
        if self.iter%2: self.learn.loss_grad = self.loss_grad+0.1*self.pred.pow(2).mean()

class FactorOfProgress(Trains):
    def after_loss(self): self.learn.loss_grad = self.loss_grad*(1+self.iter/self.n_iter)

class RateByIter(Trains):
    def before_batch(self): self.opt.set_hyper('lr', 0.1/(1+self.iter))

def cancels(event, step=1, order=1):
    "Return a callback that cancels a step: by default, the second one"
    def cancel(learn):
        if learn.train_iter==step: raise CancelBatchException
    return CallAt(event, cancel, order=order)
