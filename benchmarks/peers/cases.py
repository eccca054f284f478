"""The cases, the twin, and what is measured of a run. Needs nothing but PyTorch.

The oracle is a plain loop over real big batches."""
import math, torch
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

@dataclass(frozen=True)
class Case:
    "What is trained, and what is asked of it"
    key:str             # Names the case
    title:str           # Says what it is, for people
    n:int=256           # Samples in an epoch
    micro:int=16        # Samples in a micro-batch
    accum:int=64        # Samples a step should be made of
    epochs:int=2
    kind:str='fit'      # 'fit', 'again' (a second fit), 'interrupt', 'bad'; 'fast' for the cost
    tokens:bool=False   # Sequences of 6 tokens, some of them padding (-100)? Else one class per sample
    ignored:tuple=()    # First and last of the samples all of whose targets are ignored
    clip:float=None     # Clip the norm of a step's gradients to this
    amp:str=None        # Autocast to 'fp16', with a GradScaler, or to 'bf16'? Else double, and single for 'fast'
    device:str='cpu'
    cycle:bool=False    # One-cycle learning rates? Else a constant one
    lr:float=0.1
    mom:float=0.9

    def rate(self, pct):
        """The learning rate at this part of the run: a cosine up from a 25th for a quarter of it, then down to
        nearly none"""
        if not self.cycle: return self.lr
        def cos(a, b, pos): return a+(1+math.cos(math.pi*(1-pos)))*(b-a)/2
        return cos(self.lr/25, self.lr, pct/.25) if pct<.25 else cos(self.lr, self.lr/1e5, min((pct-.25)/.75, 1))

    def steps(self, size, n=None): return math.ceil((n or self.n)/size)*self.epochs

    def lambda_lr(self, opt, total):
        "The same as a scheduler of PyTorch's, to be stepped after each of `total` optimizer steps"
        return torch.optim.lr_scheduler.LambdaLR(opt, lambda i: self.rate(i/total)/self.lr)

    def loss(self, pred, y, **kwargs): return F.cross_entropy(pred.flatten(0, -2), y.flatten(), **kwargs)
    @property
    def dtype(self): return torch.float32 if self.amp or self.kind=='fast' else torch.float64

cases = [
    Case('A', '256 samples, steps of 64'),
    Case('B250', '250 samples: the last micro-batch has 10', n=250),
    Case('B240', '240 samples: the last step has one micro-batch fewer', n=240),
    Case('B200', '200 samples: the last step has 8 samples', n=200),
    Case('B48', '48 samples: an epoch is shorter than a step', n=48, epochs=4),
    Case('C40', 'steps of 40 with micro-batches of 16', accum=40, n=240),
    Case('padded', 'sequences, a third of the tokens padding', tokens=True),
    Case('ignored', 'all targets of one micro-batch are ignored', ignored=(32,48)),
    Case('clip', 'gradients clipped to a norm of 0.05', clip=0.05),
    Case('fp16', 'fp16 with a GradScaler on the CPU', amp='fp16'),
    Case('cycle', 'one-cycle learning rates', cycle=True),
    Case('loss', 'the recorded loss of each step, three epochs', epochs=3),
    Case('again', 'a second fit, after one on 200 samples', kind='again'),
    Case('interrupt', 'a plain fit after one interrupted in its 7th micro-batch', kind='interrupt'),
    Case('zero', 'steps of 0 samples', kind='bad', accum=0),
    Case('negative', 'steps of -64 samples', kind='bad', accum=-64),
]
by_key = {c.key:c for c in cases}

class Data:
    "Random samples of 5 features in a fixed order, with 3 classes to tell apart"
    def __init__(self, case, n=None, seed=1):
        n,gen = n or case.n,torch.Generator().manual_seed(seed)
        shape = (n,6) if case.tokens else (n,)
        x,y = torch.randn(*shape, 5, generator=gen, dtype=torch.float64),torch.randint(0, 3, shape, generator=gen)
        if case.tokens: y[:,1:][torch.rand(n, 5, generator=gen)<torch.rand(n, 1, generator=gen)*.8] = -100
        if case.ignored: y[slice(*case.ignored)] = -100
        self.ds = TensorDataset(x.to(case.dtype), y)
    def __len__(self): return len(self.ds)
    def loader(self, bs, collate_fn=None): return DataLoader(self.ds, batch_size=bs, collate_fn=collate_fn)
    @staticmethod
    def as_dicts(items):
        "A batch with the names that transformers' Trainer looks for"
        return dict(zip(('x','labels'), (torch.stack(o) for o in zip(*items))))

def make_model(case):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).to(case.dtype)

amp_dtypes = dict(fp16=torch.float16, bf16=torch.bfloat16)
def autocast(case): return torch.autocast(case.device, amp_dtypes[case.amp]) if case.amp else nullcontext()
def grad_scaler(case): return torch.amp.GradScaler(case.device, enabled=case.amp=='fp16')

def twin(case, model, data, size, epochs=None):
    "Train on real batches of `size` with a plain loop; returns the losses and the learning rates of the steps"
    opt = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.mom)
    scaler,epochs = grad_scaler(case),epochs or case.epochs
    losses,lrs,total = [],[],math.ceil(len(data)/size)*epochs
    model.train()
    for _ in range(epochs):
        for x,y in data.loader(size):
            for group in opt.param_groups: group['lr'] = case.rate(len(lrs)/total)
            with autocast(case):
                pred = model(x)
                loss = case.loss(pred.float() if case.amp else pred, y)
            scaler.scale(loss).backward()
            if case.clip:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
            lrs.append(opt.param_groups[0]['lr'])
            opt.zero_grad()
    return losses,lrs

def weights(model): return torch.cat([p.detach().double().flatten().clone() for p in model.parameters()])

def apart(a, b):
    "The largest difference between two lists of numbers; None if they are not as long as each other"
    if a is None or b is None or len(a)!=len(b): return None
    return max((abs(float(x)-float(y)) if x==x and y==y else math.inf for x,y in zip(a, b)), default=0.)

@contextmanager
def optimizer_steps():
    "The learning rate of every step that an optimizer takes, whoever asks it to"
    lrs = []
    handle = register_optimizer_step_pre_hook(lambda opt,*_: lrs.append(float(opt.param_groups[0]['lr'])))
    try: yield lrs
    finally: handle.remove()

@contextmanager
def interrupted(model, at):
    "Press Ctrl-C in the `at`th forward pass"
    seen = []
    def hook(*_):
        seen.append(0)
        if len(seen)==at: raise KeyboardInterrupt
    handle = getattr(model, 'inner', model).register_forward_pre_hook(hook)
    try: yield seen
    finally: handle.remove()
