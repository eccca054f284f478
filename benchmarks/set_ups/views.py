"Self-supervised learning: two views of each picture, with the callbacks of self_supervised"
from .data import *

repo = 'KeremTurgutlu/self_supervised'
def only(bs): return loaders(bs, [(x,0) for x,_ in tensors(56)], n=48)
def flip(x): return x.flip(-1)
def dim(x): return x*0.7+0.1
def encoder(): return nn.Sequential(*list(conv())[:-1])
fit = by('fit_flat_cos', 2, 1e-2, wd=1e-2)

class Projected(Module):
    "An encoder, and what is learned on top of it"
    def __init__(self, normalize=False, bn=False):
        self.encoder,self.projector,self.normalize = encoder(),mlp(16, 12, 8, bn=bn),normalize
    def forward(self, x):
        z = self.projector(self.encoder(x))
        return F.normalize(z, dim=1) if self.normalize else z

class WithLoss(Callback):
    "Its own method `lf` becomes the loss function"
    order,run_valid = 9,True
    def before_fit(self): self.learn.loss_func = self.lf

class Views(WithLoss):
    "Two views of each picture"
    def before_batch(self): self.learn.xb = (torch.cat([flip(self.x), dim(self.x)]),)

class SimCLR(Views):
    "Each view is to find the other one of the same picture"
    def before_batch(self):
        super().before_batch()
        n = len(self.x)
        self.learn.yb = (torch.arange(n).roll(n//2),)
    def lf(self, pred, targ):
        z = F.normalize(pred, dim=1)
        return F.cross_entropy((z@z.T/0.07).masked_fill(torch.eye(len(z)).bool(), -1e9), targ)

@set_up(repo, 'self_supervised/vision/simclr.py', 'SimCLR', fit)
def simclr(bs): return Learner(only(bs), Projected(), loss_func=F.mse_loss, cbs=SimCLR())

class BarlowTwins(Views):
    "The correlations of what the two views give are to be the identity"
    def lf(self, pred, *yb):
        a,b = ((z-z.mean(0))/z.std(0, unbiased=False) for z in pred.chunk(2))
        off = (a.T@b/len(a)-torch.eye(a.shape[1]))**2
        return (off*(torch.eye(len(off))*(1-5e-3)+5e-3)).sum()

@set_up(repo, 'self_supervised/vision/barlow_twins.py', 'Barlow Twins', fit)
def barlow_twins(bs): return Learner(only(bs), Projected(bn=True), loss_func=F.mse_loss, cbs=BarlowTwins())

def follow(slow, fast, m):
    "A moving average of parameters"
    for p,q in zip(slow.parameters(), fast.parameters()): p.data = p.data*m+q.data*(1-m)

class MOCO(WithLoss):
    "Each view is to find its key, among those of the batch and of a queue"
    def __init__(self, K=48, m=0.9, temp=0.07): self.K,self.m,self.temp = K,m,temp
    def before_fit(self):
        super().before_fit()
        self.encoder_k = deepcopy(self.learn.model).requires_grad_(False)
        self.queue,self.queue_ptr = F.normalize(torch.randn(self.K, 8), dim=1),0
    def before_batch(self):
        x = self.x
        self.learn.xb = (flip(x),)
        with torch.no_grad(): self.learn.yb = (self.encoder_k(dim(x)),)
    def lf(self, q, k): return F.cross_entropy(q@torch.cat([k, self.queue]).T/self.temp, torch.arange(len(q)))
    def after_step(self):
        follow(self.encoder_k, self.learn.model, self.m)
        n = len(self.x)
        assert self.K%n==0
        self.queue[self.queue_ptr:self.queue_ptr+n] = self.y
        self.queue_ptr = (self.queue_ptr+n)%self.K

@set_up(repo, 'self_supervised/vision/moco.py', 'MoCo', fit, keeps=lambda learn: learn.moco.queue)
def moco(bs): return Learner(only(bs), Projected(normalize=True), loss_func=F.mse_loss, cbs=MOCO())

class BYOLModel(Module):
    "Predicts what the other view gives"
    def __init__(self):
        self.encoder,self.projector,self.predictor = encoder(),mlp(16, 12, 8, bn=True),mlp(8, 12, 8, bn=True)
    def forward(self, a, b): return tuple(self.predictor(self.projector(self.encoder(o))) for o in (a,b))

class BYOL(WithLoss):
    "The targets are what a slower copy of the model gives"
    def before_fit(self):
        super().before_fit()
        self.target_model = deepcopy(self.learn.model).requires_grad_(False)
    def before_train(self): self.target_model.train(self.learn.model.projector[1].training)
    def before_validate(self): self.target_model.eval()
    def before_batch(self):
        self.learn.xb = (flip(self.x),dim(self.x))
        with torch.no_grad(): self.learn.yb = tuple(self.target_model.projector(self.target_model.encoder(o))
            for o in self.xb)
    def _mse_loss(self, x, y): return 2-2*(F.normalize(x)*F.normalize(y)).sum(-1)
    def lf(self, pred, *yb):
        (a,b),(p,q) = pred,yb
        return (self._mse_loss(a, q)+self._mse_loss(b, p)).mean()
    def after_step(self): follow(self.target_model, self.learn.model, 0.9)

@set_up(repo, 'self_supervised/vision/byol.py', 'BYOL', fit,
    keeps=lambda learn: list(learn.byol.target_model.parameters()))
def byol(bs): return Learner(only(bs), BYOLModel(), loss_func=F.mse_loss, cbs=BYOL())

class SwAVModel(Module):
    "How near a picture is to each prototype"
    def __init__(self): self.body,self.prototypes = Projected(normalize=True),nn.Linear(8, 6, bias=False)
    def forward(self, xs):
        z = self.body(torch.cat(xs))
        return z,self.prototypes(z)

class SWAV(WithLoss):
    "The prototypes of one view are to be told from the other; the pictures of a batch are spread over them evenly"
    def before_batch(self): self.learn.xb = ([flip(self.x),dim(self.x)],)
    def after_batch(self):
        w = self.learn.model.prototypes.weight.data
        w.copy_(F.normalize(w))
    def codes(self, out):
        q = (out/0.05).exp().t()
        for _ in range(3):
            q = q/q.sum(1, keepdim=True)
            q = q/q.sum(0)
        return q.t()
    def after_pred(self):
        outs = self.pred[1].chunk(2)
        with torch.no_grad(): qs = torch.stack([self.codes(o) for o in outs])
        self.learn.pred,self.learn.yb = torch.stack([F.log_softmax(o/0.1, 1) for o in outs]),(qs,)
    def lf(self, log_ps, qs): return -(qs*log_ps.flip(0)).sum(-1).mean()

@set_up(repo, 'self_supervised/vision/swav.py', 'SwAV', fit)
def swav(bs): return Learner(only(bs), SwAVModel(), loss_func=F.mse_loss, cbs=SWAV())

class DINOModel(Module):
    "A student, and the teacher that follows it"
    def __init__(self):
        self.student,self.teacher = Projected(),Projected().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer('C', torch.zeros(1, 8))
    def forward(self, xs): return self.student(torch.cat(xs))

class DINO(WithLoss):
    "The student's view is to be like the teacher's of the other view, of which the mean over batches is taken away"
    def before_batch(self):
        self.bs = len(self.x)
        self.learn.xb = ([flip(self.x),dim(self.x)],)
        with torch.no_grad(): targs = self.model.teacher(torch.cat(self.xb[0]))
        self.learn.yb,self.cb = (targs,),targs.mean(0, keepdim=True)
    def after_step(self):
        follow(self.model.teacher, self.model.student, 0.9)
        self.model.C = self.model.C*0.9+self.cb*0.1
    def lf(self, pred, yb):
        ps,qs = F.log_softmax(pred/0.1, -1).chunk(2),F.softmax((yb-self.model.C)/0.04, -1).chunk(2)
        return -((qs[0]*ps[1]).sum(-1).mean()+(qs[1]*ps[0]).sum(-1).mean())/2

@set_up(repo, 'self_supervised/vision/dino.py', 'DINO', fit)
def dino(bs): return Learner(only(bs), DINOModel(), loss_func=F.mse_loss, cbs=DINO())

class CLIP(Module):
    "Pictures and texts in one space"
    def __init__(self):
        self.image,self.text = Projected(),nn.Sequential(nn.EmbeddingBag(10, 8), nn.Linear(8, 8))
        self.logit_scale = nn.Parameter(torch.tensor(1/0.07).log())
    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1),F.normalize(self.text(text), dim=-1)

class CLIPTrainer(WithLoss):
    "Each picture is to find its text, and each text its picture"
    def lf(self, pred, *yb):
        a,b = pred
        logits,labels = self.model.logit_scale.exp()*a@b.T,torch.arange(len(a))
        return (F.cross_entropy(logits, labels)+F.cross_entropy(logits.T, labels))/2
    def after_step(self): self.model.logit_scale.data.clamp_(0, 4.6052)

@set_up(repo, 'self_supervised/multimodal/clip.py', 'CLIP', fit)
def clip(bs):
    dls = loaders(bs, [(x, torch.tensor([int(y),3,i%10]), 0) for i,(x,y) in enumerate(tensors())])
    return Learner(dls, CLIP(), loss_func=F.mse_loss, cbs=CLIPTrainer())
