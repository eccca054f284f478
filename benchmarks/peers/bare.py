"A bare PyTorch loop: divide by k, step after each k micro-batches and at the end of an epoch."
import torch
from torch import nn
from .cases import autocast, grad_scaler
from .peer import Peer, whole

class Bare(Peer):
    key,title,package = 'bare','bare PyTorch loop','torch'
    docs = 'https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation'
    how = 'the loss divided by k; a step after k micro-batches and after the last of an epoch'

    def start(self, case, model):
        super().start(case, model)
        self.opt = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.mom)
        self.scaler = grad_scaler(case)

    def fit(self, data, epochs, micro, accum):
        k,case,model,opt,scaler = whole(micro, accum),self.case,self.model,self.opt,self.scaler
        loader = data.loader(micro)
        sched = case.lambda_lr(opt, case.steps(accum, len(data))) if case.cycle else None
        model.train()
        for _ in range(epochs):
            for i,(x,y) in enumerate(loader):
                with autocast(case):
                    pred = model(x)
                    loss = case.loss(pred.float() if case.amp else pred, y)/k
                scaler.scale(loss).backward()
                if (i+1)%k==0 or i+1==len(loader):
                    if case.clip:
                        scaler.unscale_(opt)
                        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                    scaler.step(opt)
                    scaler.update()
                    opt.zero_grad()
                    if sched: sched.step()

peers = [Bare]
