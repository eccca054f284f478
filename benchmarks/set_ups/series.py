"Time series: tsai's model, its `one_batch`, and callbacks that it brings"
from .data import *

@contextmanager
def own_one_batch():
    "tsai replaces `one_batch` of all Learners when it is imported"
    stock = Learner.one_batch
    def one_batch(self, i, b):
        self.iter = i
        self._split(to_device(b, device=self.dls.device) if self.dls.device is not None else b)
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)
    one_batch.__module__ = 'tsai.learner'   # where tsai defines it, by which fastaccum knows it
    Learner.one_batch = one_batch
    try: yield
    finally: Learner.one_batch = stock

def series(n=52):
    "Two variables of 16 steps, and a class"
    x = torch.tensor(pixels[:n,...,0]/255.).float()
    return list(zip(torch.stack([x.mean(1), x.mean(2)], 1), torch.tensor(classes[:n])))

class InceptionModule(Module):
    "Convolutions of three lengths beside each other"
    def __init__(self, ni, nf):
        self.convs = nn.ModuleList([nn.Conv1d(ni, nf, k, padding=k//2, bias=False) for k in (9,5,3)])
        self.bn = nn.BatchNorm1d(3*nf)
    def forward(self, x): return self.bn(torch.cat([o(x) for o in self.convs], 1)).relu()

tsai = partial(set_up, 'timeseriesAI/tsai', around=own_one_batch)

@tsai('tsai/models/InceptionTime.py', 'InceptionTime, with the `one_batch` of tsai')
def inception(bs):
    net = nn.Sequential(InceptionModule(2, 4), InceptionModule(12, 4), nn.AdaptiveAvgPool1d(1), Flatten(),
        nn.Linear(12, 10))
    return Learner(loaders(bs, series()), net, loss_func=CrossEntropyLossFlat(), metrics=accuracy,
        moms=(0.95,0.85,0.95))

class TST(Module):
    "A transformer on the steps of a series, without BatchNorm"
    def __init__(self, n=8):
        self.emb,self.head = nn.Linear(2, n),nn.Sequential(nn.Flatten(), nn.Linear(16*n, 10))
        self.body = nn.TransformerEncoderLayer(n, 2, 16, dropout=0., batch_first=True)
    def forward(self, x): return self.head(self.body(self.emb(x.transpose(1, 2))))

class Scaled:
    "A transform of batches, stronger or weaker by `magnitude`; without random numbers"
    def __init__(self, magnitude=0.5): self.magnitude = magnitude
    def __call__(self, b): return b[0]*(1+self.magnitude),b[1]

class TransformScheduler(Callback):
    "Change the magnitude of transforms, batch by batch"
    def __init__(self, schedule_func): self.schedule_func = schedule_func
    def before_fit(self):
        self.mult = [self.schedule_func(o) for o in np.linspace(0, 1, len(self.dls.train)*self.n_epoch)]
        self.tfm = self.dls.train.after_batch
        self.magnitude = self.tfm.magnitude
        self.tfm.magnitude = self.magnitude*self.mult[0]
    def after_batch(self):
        if not self.training or self.train_iter>=len(self.mult): return
        self.tfm.magnitude = self.magnitude*self.mult[self.train_iter]
    def after_fit(self): self.tfm.magnitude = self.magnitude

@tsai('tsai/callback/core.py', '`TransformScheduler`: stronger transforms with each batch')
def transform_scheduler(bs):
    return Learner(loaders(bs, series(), after_batch=Scaled()), TST(), loss_func=CrossEntropyLossFlat(),
        cbs=TransformScheduler(lambda pct: 1-pct))

class MVP(Callback):
    "Hide some of the values; the model learns to say what they were"
    order = 60
    def __init__(self, r=0.15): self.r = r
    def before_fit(self):
        self.learn.loss_func,self.crit = self._loss,MSELossFlat()
        self.learn.model.head = nn.Conv1d(8, 2, 1)
        self.learn.create_opt()
    def before_batch(self):
        self.mask = torch.rand(self.x.shape)<self.r
        self.learn.yb = (self.x,)
        self.learn.xb = (self.x.masked_fill(self.mask, 0),)
    def _loss(self, preds, target): return self.crit(preds[self.mask], target[self.mask])

class Steps(TST):
    "Returns a value for each step"
    def forward(self, x): return self.head(self.body(self.emb(x.transpose(1, 2))).transpose(1, 2))

@tsai('tsai/callback/MVP.py', '`MVP`: the loss is over values that are hidden at random')
def mvp(bs): return Learner(loaders(bs, series()), Steps(), loss_func=CrossEntropyLossFlat(), cbs=MVP())

class WeightedPerSampleLoss(Callback):
    "Each item has a weight in the loss"
    order = 65
    def __init__(self, instance_weights): self.instance_weights = instance_weights
    def before_fit(self):
        self.old_loss = self.learn.loss_func
        self.learn.loss_func = _PerInstanceLoss()
    def before_batch(self): self.learn.loss_func.weights = self.instance_weights[self.learn.dl.idxs]
    def after_fit(self): self.learn.loss_func = self.old_loss

class _PerInstanceLoss(Module):
    def forward(self, pred, targ):
        w = self.weights
        return (F.cross_entropy(pred, targ, reduction='none')*w/w.sum()).sum()

class NumpyDataLoader(DataLoader):
    "Knows which items its last batch is of"
    def create_batch(self, b):
        self.idxs = list(b)
        xs,ys = zip(*(self.dataset[i] for i in b))
        return torch.stack(xs),torch.stack(ys)
    def create_item(self, s): return s

@tsai('tsai/callback/core.py', '`WeightedPerSampleLoss`: items have weights in the loss')
def weighted_samples(bs):
    return Learner(loaders(bs, series(), cls=NumpyDataLoader), TST(), loss_func=nn.CrossEntropyLoss(),
        cbs=WeightedPerSampleLoss(torch.linspace(0.2, 2, 52)))

class BatchLossFilter(Callback):
    "Train on those samples of the batch that have most of its loss"
    def __init__(self, loss_perc=0.5): self.loss_perc = loss_perc
    def before_batch(self):
        if not self.training: return
        with torch.no_grad():
            losses = F.cross_entropy(self.learn.model(self.x), self.y, reduction='none')
            idxs = losses.argsort(descending=True)
            n = max(1, int(((losses/losses.sum())[idxs].cumsum(0)>self.loss_perc).float().argmax()))
        self.learn.xb,self.learn.yb = (tuple(o[idxs[:n]] for o in b) for b in (self.xb,self.yb))

@tsai('tsai/callback/experimental.py', '`BatchLossFilter`: only the hardest samples of a batch')
def batch_loss_filter(bs):
    return Learner(loaders(bs, series()), TST(), loss_func=CrossEntropyLossFlat(), cbs=BatchLossFilter())
