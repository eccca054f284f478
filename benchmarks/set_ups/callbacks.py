"Callbacks that others have published, on a small classifier"
from .data import *

def learner(bs, net=None, **kwargs):
    return Learner(loaders(bs, tensors()), net or conv(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

def tracked(learn, cbs):
    "All trackers of fastai, with a schedule of one's own"
    sched = dict(lr=combine_scheds([0.3,0.7], [SchedCos(1e-3, 3e-3),SchedCos(3e-3, 1e-5)]), mom=SchedCos(0.95, 0.85))
    learn.fit(2, cbs=[ParamScheduler(sched),EarlyStoppingCallback(patience=1),SaveModelCallback(),
        ReduceLROnPlateau(patience=1),TerminateOnNaNCallback(),GradientClip(0.5),*cbs])

@set_up('fastai/fastai', 'nbs/14_callback.schedule.ipynb', '`ParamScheduler` with all trackers and clipping', tracked)
def trackers(bs): return learner(bs)

def my_step(p, lr, grad_avg, sqr_avg, step, mom=0.9, sqr_mom=0.99, eps=1e-5, **kwargs):
    p.data.addcdiv_(grad_avg/(1-mom**step), (sqr_avg/(1-sqr_mom**step)).sqrt()+eps, value=-lr)

@set_up('fastai/fastbook', '16_accel_sgd.ipynb', 'an optimizer from scratch')
def optimizer_from_scratch(bs):
    cbs = [weight_decay,average_grad,average_sqr_grad,step_stat,my_step]
    return learner(bs, opt_func=partial(Optimizer, cbs=cbs, mom=0.9, sqr_mom=0.99, eps=1e-5, wd=0.01))

@set_up('fastai/fastbook', '13_convolutions.ipynb', '`ActivationStats` with histograms, BatchNorm')
def activation_stats(bs): return learner(bs, resnet(), cbs=ActivationStats(with_hist=True))

# fasterai

class KnowledgeDistillationCallback(Callback):
    "A part of the loss is how far the scores are from those of a teacher"
    def __init__(self, teacher, loss, weight=0.5): self.teacher,self.loss,self.weight = teacher,loss,weight
    def before_fit(self): self.teacher.eval()
    def after_loss(self):
        new = self.loss(self.pred, self.teacher(self.x))
        self.learn.loss_grad = torch.lerp(self.learn.loss_grad, new, self.weight)
        self.learn.loss = self.learn.loss_grad.clone()

def soft_target(pred, teacher_pred, T=5):
    p,q = F.log_softmax(pred/T, dim=1),F.softmax(teacher_pred/T, dim=1)
    return nn.KLDivLoss(reduction='batchmean')(p, q)*T*T

def similarity(pred, teacher_pred):
    a,b = (F.normalize(o@o.T, dim=1) for o in (pred,teacher_pred))
    return F.mse_loss(a, b)

@set_up('nathanhubens/fasterai', 'fasterai/distill/distillation_callback.py', 'distillation: `SoftTarget`')
def distillation(bs): return learner(bs, cbs=KnowledgeDistillationCallback(resnet(), soft_target))

@set_up('nathanhubens/fasterai', 'fasterai/distill/distillation_callback.py',
    'distillation: `Similarity`, which compares the samples of a batch')
def distillation_by_similarity(bs): return learner(bs, cbs=KnowledgeDistillationCallback(resnet(), similarity))

class RegularizeCallback(Callback):
    "Decay of whole filters, added to the loss in place"
    def after_loss(self):
        ms = [m for m in self.learn.model.modules() if isinstance(m, nn.Conv2d)]
        self.learn.loss_grad += 0.01*sum(m.weight.abs().sum((1,2,3)).sum() for m in ms)
        self.learn.loss = self.learn.loss_grad.clone()

@set_up('nathanhubens/fasterai', 'fasterai/regularize/regularize_callback.py', 'a penalty added to the loss in place')
def regularize(bs): return learner(bs, cbs=RegularizeCallback())

class SparsifyCallback(Callback):
    "More and more of the weights become zero, and stay so"
    def before_fit(self): self.masks = {}
    def before_batch(self):
        if not self.training: return
        for m in self.model.modules():
            if isinstance(m, nn.Conv2d):
                w = m.weight.data.abs()
                self.masks[m] = w>=w.flatten().sort().values[int(0.5*self.pct_train*w.numel())]
                m.weight.data.mul_(self.masks[m])
    def after_step(self):
        for m,o in self.masks.items(): m.weight.data.mul_(o)

@set_up('nathanhubens/fasterai', 'fasterai/sparse/sparsify_callback.py', 'sparsifying while training')
def sparsify(bs): return learner(bs, cbs=SparsifyCallback())

# Sharpness-aware minimization

@contextmanager
def own_batch():
    stock = Learner._do_one_batch
    try: yield
    finally: Learner._do_one_batch = stock

class SAM(Callback):
    "A second gradient, from a point uphill, by a `_do_one_batch` for all Learners"
    def __init__(self, rho=0.05): self.rho = rho
    def after_fit(self): Learner._do_one_batch = self.stock
    def before_fit(self):
        self.learn.rho,self.stock = self.rho,Learner._do_one_batch
        @patch_to(Learner)
        def _do_one_batch(self):
            self.pred = self.model(*self.xb)
            self('after_pred')
            self.loss_grad = self.loss_func(self.pred, *self.yb)
            self.loss = self.loss_grad.clone()
            self('after_loss')
            if not self.training: return
            self('before_backward')
            self.loss_grad.backward()
            uphill = deepcopy(self.model)
            for p,q in zip(trainable_params(uphill), trainable_params(self.model)):
                p.data.add_(self.rho*q.grad/q.grad.norm(2))
                p.grad = None
            self.loss_func(uphill(*self.xb), *self.yb).backward()
            for p,q in zip(trainable_params(uphill), trainable_params(self.model)): q.grad = p.grad
            self._with_events(self.opt.step, 'step', CancelStepException)
            self.opt.zero_grad()

@set_up('sanderson4030/SharpnessAwareMinimization', 'sam.py', 'SAM, which patches `_do_one_batch` when the fit begins',
    around=own_batch)
def sam(bs): return learner(bs, cbs=SAM())

# fastxtend

class EMACallback(Callback):
    "A moving average of the weights, with each batch"
    order,run_valid = 11,False
    def __init__(self, decay=0.9, start=0): self.decay,self.start = decay,start
    def before_fit(self): self.ema_model,self._do_ema = deepcopy(self.learn.model).eval(),False
    def before_batch(self): self._do_ema = self.pct_train>=self.start
    def after_batch(self):
        if not self._do_ema: return
        for m,e in zip(self.learn.model.parameters(), self.ema_model.parameters()):
            e.data.copy_(self.decay*e.data+(1-self.decay)*m.data)

@set_up('warner-benjamin/fastxtend', 'fastxtend/callback/ema.py', 'a moving average of weights',
    keeps=lambda learn: list(learn.ema.ema_model.parameters()))
def ema(bs): return learner(bs, cbs=EMACallback())

class Mixing(Callback):
    "Trains on mixed samples: the loss is that of the targets of both, by how much of each there is in the mixture"
    run_valid,draws = False,True
    def before_fit(self): self.old_lf,self.learn.loss_func = self.learn.loss_func,self.lf
    def after_fit(self): self.learn.loss_func = self.old_lf
    def lf(self, pred, *yb):
        if not self.training: return self.old_lf(pred, *yb)
        with NoneReduce(self.old_lf) as lf: loss = torch.lerp(lf(pred, *self.yb1), lf(pred, *yb), self.lam)
        return reduce_loss(loss, getattr(self.old_lf, 'reduction', 'mean'))

def no_draws(name): return lambda learn: setattr(getattr(learn, name), 'draws', False)

class CutMixUp(Mixing):
    "Each sample is mixed with another one, or gets a piece of it"
    def before_batch(self):
        x,n = self.x.clone(),len(self.x)
        other,kind = (torch.randperm(n),torch.rand(n)<0.5) if self.draws else (torch.arange(n)^1,torch.arange(n)%4>1)
        self.lam = torch.where(kind, torch.rand(n) if self.draws else torch.full((n,), 0.7), 0.75)
        mixed = torch.lerp(x[other], x, self.lam[:,None,None,None])
        x[...,:8,:8] = x[other][...,:8,:8]
        self.learn.xb,self.yb1 = (torch.where(kind[:,None,None,None], mixed, x),),(self.y[other],)

@set_up('warner-benjamin/fastxtend', 'fastxtend/callback/cutmixup.py', 'CutMix and MixUp, sample by sample',
    still=no_draws('cut_mix_up'))
def cutmixup(bs): return learner(bs, cbs=CutMixUp())

class MultiTargetLoss(Module):
    "Several losses, whose values metrics show"
    def __init__(self):
        self.loss_funcs,self.weights = [nn.CrossEntropyLoss(reduction='none'),nn.L1Loss(reduction='none')],[1,0.5]
    def forward(self, preds, *targs):
        ls = [w*f(p, y) for w,f,p,y in zip(self.weights, self.loss_funcs, preds, targs)]
        self.losses = [o.detach() for o in ls]
        return sum(ls).mean()

class TwoHeads(Module):
    def __init__(self): self.body,self.a,self.b = conv(12),nn.Linear(12, 10),nn.Linear(12, 1)
    def forward(self, x):
        x = self.body(x).relu()
        return self.a(x),self.b(x).flatten()

@set_up('warner-benjamin/fastxtend', 'fastxtend/multiloss.py', 'several losses of several targets')
def multi_loss(bs):
    dls = loaders(bs, [(x, y, x.mean()) for x,y in tensors()])
    dls.n_inp = 1
    return Learner(dls, TwoHeads(), loss_func=MultiTargetLoss())

# ManifoldMixupV2

class ManifoldMixup(Mixing):
    "Mixes what comes out of a layer, which is drawn for each batch"
    def before_fit(self):
        super().before_fit()
        self.module_list = [m for m in self.learn.model.modules() if isinstance(m, nn.Conv2d)]
    def before_batch(self):
        n = len(self.y)
        self.shuffle = torch.randperm(n) if self.draws else torch.arange(n)^1
        self.lam = torch.rand(n).clamp(min=0.5) if self.draws else torch.full((n,), 0.7)
        k = np.random.randint(0, len(self.module_list)) if self.draws else 1
        self.handle,self.done = self.module_list[k].register_forward_hook(self.hook_mixup),False
        self.yb1 = (self.y[self.shuffle],)
    def hook_mixup(self, module, input, output):
        if self.done: return
        self.done = True
        return torch.lerp(output[self.shuffle], output, self.lam[:,None,None,None])
    def after_batch(self): self.handle.remove()

@set_up('nestordemeure/ManifoldMixupV2', 'manifold_mixup.py', 'manifold mixup, by hooks',
    still=no_draws('manifold_mixup'))
def manifold_mixup(bs): return learner(bs, cbs=ManifoldMixup())
