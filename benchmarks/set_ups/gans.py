"Generative models: what trains with more than one optimizer, or draws noise"
from fastai.vision.gan import *
from .data import *

fit = by('fit', 2, 2e-4, wd=0.)

@set_up('fastai/fastai', 'nbs/24_vision.gan.ipynb', 'Wasserstein GAN', fit)
def wgan(bs):
    dls = blocks(bs, TransformBlock, ImageBlock, get_x=partial(generate_noise, size=6), get_y=pixels.__getitem__)
    return GANLearner.wgan(dls, basic_generator(16, 3, in_sz=6, n_features=8), basic_critic(16, 3, n_features=8),
        opt_func=partial(Adam, mom=0.))

class Crit(Module):
    "Binary cross-entropy, for targets of any shape"
    def forward(self, p, y): return F.binary_cross_entropy_with_logits(p.flatten(), y.flatten().to(p))

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/course2020/vision/07_Super_Resolution.ipynb',
    'super-resolution: generator and critic from two Learners', fit)
def super_resolution(bs):
    dls = loaders(bs, [(F.avg_pool2d(x, 3, 1, 1), x) for x,_ in tensors()])
    gen = Learner(dls, nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)),
        loss_func=nn.MSELoss())
    crit = Learner(dls, conv(1), loss_func=Crit())
    return GANLearner.from_learners(gen, crit, weights_gen=(1.,50.), switcher=AdaptiveGANSwitcher(critic_thresh=.65),
        opt_func=partial(Adam, mom=0.), cbs=GANDiscriminativeLR(mult_lr=5.))

class CycleGAN(Module):
    "Two generators, each from one kind of pictures to the other, and two critics"
    def __init__(self):
        def gen(): return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1))
        self.G_A,self.G_B,self.D_A,self.D_B = gen(),gen(),conv(1),conv(1)
    def forward(self, x):
        a,b = x
        fakes = self.G_A(b),self.G_B(a)
        return (*fakes, self.G_A(a), self.G_B(b)) if self.training else fakes*2

class CycleGANLoss(Module):
    "There and back again gives the same picture, and the critics take it for a real one"
    def __init__(self, cgan, l_A=10., l_B=10., l_idt=0.5):
        self.cgan,self.l_A,self.l_B,self.l_idt = [cgan],l_A,l_B,l_idt
    def crit(self, out, targ): return F.mse_loss(out, torch.full_like(out, targ))
    def set_input(self, a, b): self.real_A,self.real_B = a,b
    def forward(self, output, target):
        (fake_A,fake_B,idt_A,idt_B),g = output,self.cgan[0]
        self.id_loss = self.l_idt*(self.l_A*F.l1_loss(idt_A, self.real_A)+self.l_B*F.l1_loss(idt_B, self.real_B))
        self.gen_loss = self.crit(g.D_A(fake_A), 1.)+self.crit(g.D_B(fake_B), 1.)
        self.cyc_loss = self.l_A*F.l1_loss(g.G_A(fake_B), self.real_A)+self.l_B*F.l1_loss(g.G_B(fake_A), self.real_B)
        return self.id_loss+self.gen_loss+self.cyc_loss

class TwoOptimizers(Callback):
    "The Learner's optimizer steps for the generators; the critics have another one"
    run_before = Recorder
    def _set_trainable(self, disc=False):
        for nm in ('G_A','G_B','D_A','D_B'): getattr(self.model, nm).requires_grad_((nm[0]=='D')==disc)
    def before_train(self):
        if getattr(self, 'opt_G', None) is None:
            m = self.model
            self.opt_G = self.learn.opt_func([params(m.G_A)+params(m.G_B)], self.learn.lr)
            self.opt_D = self.learn.opt_func([params(m.D_A)+params(m.D_B)], self.learn.lr)
        self.opt_D.hypers = self.learn.opt.hypers
        self.learn.opt = self.opt_G
    def before_batch(self):
        self._training = self.model.training
        self.learn.xb = ((self.xb[0],self.yb[0]),)
        self.learn.loss_func.set_input(*self.learn.xb[0])

class CycleGANTrainer(TwoOptimizers):
    "The critics step after each batch"
    def before_batch(self):
        self._set_trainable()
        super().before_batch()
    def after_step(self): self.opt_D.hypers = self.learn.opt.hypers
    def after_batch(self):
        if not self._training: return
        fakes,reals,crit = [o.detach() for o in self.pred[:2]],self.xb[0],self.loss_func.crit
        self._set_trainable(disc=True)
        for d,real,fake in zip((self.model.D_A,self.model.D_B), reals, fakes):
            (0.5*(crit(d(real), 1.)+crit(d(fake), 0.))).backward()
        self.opt_D.step()
        self.opt_D.zero_grad()
        self._set_trainable()

def two_kinds(bs): return loaders(bs, [(x,1-x.flip(-1)) for x,_ in tensors()])
def critics(learn): return [list(o.parameters()) for o in (learn.model.D_A,learn.model.D_B)]

@set_up('tmabraham/UPIT', 'upit/train/cyclegan.py', 'CycleGAN: critics with an optimizer of their own', fit,
    keeps=critics)
def cyclegan(bs):
    net = CycleGAN()
    return Learner(two_kinds(bs), net, loss_func=CycleGANLoss(net), opt_func=partial(Adam, mom=0.5, sqr_mom=0.999),
        cbs=CycleGANTrainer, metrics=LossMetrics('id_loss,gen_loss,cyc_loss'))

class DualGANTrainer(TwoOptimizers):
    "The critics step between the generators' forward pass and their loss"
    def after_pred(self):
        if not self._training: return
        fakes,reals = [o.detach() for o in self.pred[:2]],self.xb[0]
        self._set_trainable(disc=True)
        ds = self.model.D_A,self.model.D_B
        sum(d(fake).mean()-d(real).mean() for d,real,fake in zip(ds, reals, fakes)).backward()
        self.opt_D.step()
        for d in ds:
            for p in d.parameters(): p.data.clamp_(-0.1, 0.1)
        self.opt_D.zero_grad()
        self._set_trainable()

class DualGANLoss(CycleGANLoss):
    def crit(self, out, targ): return -out.mean()

@set_up('tmabraham/UPIT', 'upit/train/dualgan.py', 'DualGAN: critics step in `after_pred`', fit, keeps=critics)
def dualgan(bs):
    net = CycleGAN()
    return Learner(two_kinds(bs), net, loss_func=DualGANLoss(net, l_A=1., l_B=1., l_idt=0.), opt_func=RMSProp,
        cbs=DualGANTrainer)

class Denoiser(Module):
    "Says what noise is in a picture, given how much there is"
    def __init__(self):
        self.emb,self.a,self.b = nn.Embedding(100, 8),nn.Conv2d(3, 8, 3, padding=1),nn.Conv2d(8, 3, 3, padding=1)
    def forward(self, x, t): return self.b((self.a(x)+self.emb(t)[...,None,None]).relu())

class DDPM(Callback):
    "Noise is added to the pictures of the batch, and is the target"
    def __init__(self, n_steps=100, noise=True):
        self.noise,self.alpha_bar = noise,(1-torch.linspace(0.0001, 0.02, n_steps)).cumprod(0)
    def before_batch(self):
        x0 = self.x
        eps,t = torch.randn(x0.shape),torch.randint(0, len(self.alpha_bar), (len(x0),))
        if not self.noise: eps,t = x0.flip(-1),(x0.flatten(1).sum(1)*10).long()%len(self.alpha_bar)
        a = self.alpha_bar[t][:,None,None,None]
        self.learn.xb,self.learn.yb = (a.sqrt()*x0+(1-a).sqrt()*eps,t),(eps,)

@set_up('fastai/course22p2', 'nbs/15_DDPM.ipynb', 'diffusion: a callback draws noise and its strength',
    still=lambda learn: setattr(learn.ddpm, 'noise', False))
def ddpm(bs): return Learner(loaders(bs, tensors()), Denoiser(), loss_func=nn.MSELoss(), cbs=DDPM())
