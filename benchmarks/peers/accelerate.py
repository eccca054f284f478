"accelerate: `accumulate`, and what its docs say to do for samples of variable size."
import math, torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from .peer import Peer, whole

class Accumulate(Peer):
    key,title,package = 'accelerate','accelerate, accumulate()','accelerate'
    docs = 'https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation'
    how = '`with accelerator.accumulate(model)`, everything prepared'

    def start(self, case, model):
        super().start(case, model)
        for o in (AcceleratorState,PartialState,GradientState): o._reset_state()   # each case as in a fresh process
        self.acc = Accelerator(cpu=case.device=='cpu', mixed_precision=case.amp or 'no')
        self.net,self.opt = self.acc.prepare(model, torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.mom))

    def fit(self, data, epochs, micro, accum):
        case,acc = self.case,self.acc
        acc.gradient_accumulation_steps = k = whole(micro, accum)
        loader = acc.prepare(data.loader(micro))
        sched = acc.prepare(case.lambda_lr(self.opt.optimizer, case.steps(accum, len(data)))) if case.cycle else None
        self.net.train()
        for _ in range(epochs): self.epoch(loader, sched, k)

    def epoch(self, loader, sched, k):
        case,acc,model,opt = self.case,self.acc,self.net,self.opt
        for x,y in loader:
            with acc.accumulate(model):
                acc.backward(case.loss(model(x), y))
                if case.clip and acc.sync_gradients: acc.clip_grad_norm_(model.parameters(), case.clip)
                opt.step()
                if sched: sched.step()
                opt.zero_grad()

class Recipe(Accumulate):
    key,title = 'accelerate-recipe','accelerate, recipe for variable sizes'
    how = "its docs' loop: fetch a step's micro-batches first, divide summed losses by their targets"

    def epoch(self, loader, sched, k):
        case,acc,model,opt,batches = self.case,self.acc,self.net,self.opt,iter(loader)
        n = len(loader)
        for i in range(math.ceil(n/k)):
            step = [next(batches) for _ in range(min(k, n-i*k))]
            items = acc.gather(sum(y.ne(-100).sum() for _,y in step)).sum().item()
            for x,y in step: acc.backward(case.loss(model(x), y, reduction='sum')*k*acc.num_processes/items)
            if case.clip: acc.clip_grad_norm_(model.parameters(), case.clip)
            opt.step()
            if sched: sched.step()
            opt.zero_grad()

peers = [Accumulate, Recipe]
