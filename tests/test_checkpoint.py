"""Activations computed again: the run without the callback, equal to the bit, and nothing left behind.

Launched by `test_several_processes`, it is what each of the processes runs."""
import copy, os, pickle, random, subprocess, sys, warnings
from pathlib import Path
import numpy as np, pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.hook import ActivationStats, hook_output
from fastai.callback.progress import ProgressCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, load_learner
from fastai.layers import SequentialEx
from fastai.torch_core import TensorBase, TensorImage
from fastai.vision.learner import create_unet_model, create_vision_model
from fastai.vision.models.xresnet import xresnet18
from fastcore.basics import noop
from fastcore.foundation import L
from torch.utils.data import TensorDataset
from torchvision.models import resnet18
from fastaccum import ActivationCheckpoint, GradientAccumulation
from fastaccum.ways import moment
from fastaccum.ways.moment import recomputing
from common import CpuMixedPrecision, Raise

tells = hasattr(torch._C._autograd, '_top_saved_tensors_default_hooks')   # PyTorch 2.6 does not: `again` is None

class Block(nn.Module):
    "BatchNorm, dropout, something in place, and a skip"
    def __init__(self, n=8):
        super().__init__()
        self.lin1,self.lin2 = nn.Linear(n, n),nn.Linear(n, n)
        self.bn,self.act,self.drop = nn.BatchNorm1d(n),nn.ReLU(inplace=True),nn.Dropout()
    def forward(self, x): return x+self.lin2(self.drop(self.act(self.bn(self.lin1(x)))))

def net(*blocks, n=8):
    blocks = blocks or [Block() for _ in range(3)]
    return nn.Sequential(nn.Linear(5, n), *blocks, nn.BatchNorm1d(n), nn.Linear(n, 3))

class Data(TensorDataset):
    def new_empty(self): return Data(*(t[:0] for t in self.tensors))

def data(n=40, shape=(5,), seed=0):
    gen = torch.Generator().manual_seed(seed)
    return Data(torch.randn(n, *shape, generator=gen), torch.randint(0, 3, (n,), generator=gen))

def learner(make=net, bs=8, ds=None, loss_func=F.cross_entropy, **kwargs):
    torch.manual_seed(0)
    ds = data() if ds is None else ds
    learn = Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds, bs=bs)), make(), loss_func, **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def generators(): return [torch.get_rng_state().numpy(),np.random.get_state()[1],np.array(random.getstate()[1])]

def fitted(make, cbs, fit):
    learn = make()
    for seed in (torch.manual_seed,random.seed,np.random.seed): seed(1)
    fit(learn, cbs)
    return learn,generators()

def one_cycle(learn, cbs): learn.fit_one_cycle(1, 1e-2, cbs=cbs)

def assert_same(a, b):
    for (k,x),y in zip(a.model.state_dict().items(), b.model.state_dict().values()): assert torch.equal(x, y), k
    for (k,p),q in zip(a.model.named_parameters(), b.model.parameters()):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad), k
    assert len(a.recorder.losses)>0 and [*map(str, a.recorder.losses)]==[*map(str, b.recorder.losses)]
    assert str(a.recorder.values)==str(b.recorder.values) and a.recorder.lrs==b.recorder.lrs

def check(make=learner, cbs=list, fit=one_cycle, ran=True, **kwargs):
    "The run with checkpoints is the run without; returns both, and the callback"
    (a,rng),cb = fitted(make, cbs(), fit),ActivationCheckpoint(**kwargs)
    b,other = fitted(make, [cb,*cbs()], fit)
    assert_same(a, b)
    for x,y in zip(rng, other): assert np.array_equal(x, y)
    assert not any('forward' in vars(m) for m in b.model.modules()) and not recomputing()
    if ran: assert (cb.segments.again>0)==tells and all(o.calls for o in cb.segments)
    return a,b,cb

# The models of fastai

images = partial(data, 8, (3,32,32))
class Masks(TensorDataset):
    def __getitem__(self, i): return self.tensors[0][i],(self.tensors[0][i,0]>0).long()

@pytest.mark.parametrize('offload', [False,True])
@pytest.mark.parametrize('arch,n', [(resnet18,10),(xresnet18,10)], ids=['resnet18','xresnet18'])
def test_vision_learner(arch, n, offload):
    make = partial(learner, lambda: create_vision_model(arch, 3, pretrained=False), 4, images())
    a,b,cb = check(make, offload=offload)
    assert len(cb.segments)==n and cb.segments[0].name=='0[:4]'

def test_unet():
    "The features that its hooks keep are those of the forward pass, and none of them is held on to"
    def make(): return learner(lambda: create_unet_model(resnet18, 3, (32,32), pretrained=False), 4,
        Masks(*images().tensors))
    a,b,cb = check(make)
    assert {o.kind for o in cb.segments}>={'UnetBlock','BasicBlock','ResBlock'}
    for x,y in zip(a.model.sfs, b.model.sfs): assert torch.equal(x.stored, y.stored)

texts = [torch.randint(2, 20, (6+i%7,), generator=torch.Generator().manual_seed(i)) for i in range(24)]

def language_model(bs=4):
    from fastai.text.data import LMDataLoader
    from fastai.text.models import AWD_LSTM, get_language_model
    from fastai.text.models.awdlstm import awd_lstm_lm_config
    from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer
    from fastai.losses import CrossEntropyLossFlat
    torch.manual_seed(0)
    model = get_language_model(AWD_LSTM, 20, dict(awd_lstm_lm_config, emb_sz=6, n_hid=8))
    dls = DataLoaders(*(LMDataLoader(texts, bs=bs, seq_len=5) for _ in range(2)))
    learn = Learner(dls, model, CrossEntropyLossFlat(), cbs=[ModelResetter(),RNNCallback(),RNNRegularizer(2, 1)])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def test_language_model():
    "AWD_LSTM: weight dropout, the hidden state, and two more outputs for the RNNCallback's penalties"
    from fastai.text.models import AWD_LSTM
    a,b,cb = check(language_model)
    assert [o.kind for o in cb.segments].count('WeightDropout')==3
    for kwargs in (dict(segments=AWD_LSTM), dict(offload=True)):
        a,b,cb = check(language_model, **kwargs)
        for x,y in zip(a.model[0].hidden, b.model[0].hidden): assert all(torch.equal(*o) for o in zip(x, y))

def test_text_classifier():
    "The encoder runs several times in a forward pass"
    from fastai.text.models import AWD_LSTM, get_text_classifier
    from fastai.text.models.awdlstm import awd_lstm_clas_config
    from fastai.callback.rnn import ModelResetter, RNNCallback
    config = dict(awd_lstm_clas_config, emb_sz=6, n_hid=8)
    ds = TensorDataset(torch.randint(2, 20, (24,11), generator=torch.Generator().manual_seed(0)), data(24).tensors[1])
    make = lambda: learner(lambda: get_text_classifier(AWD_LSTM, 20, 3, seq_len=4, config=config), 8, ds,
        lambda p,y: F.cross_entropy(p, y), cbs=[ModelResetter(),RNNCallback()])
    a,b,cb = check(make)
    assert {o.kind:o.calls for o in cb.segments}['WeightDropout']==3*3   # pieces of 4 tokens, and batches

def test_tabular():
    from fastai.tabular.model import TabularModel
    cats = torch.randint(0, 4, (40,2), generator=torch.Generator().manual_seed(0))
    ds = TensorDataset(cats, *data().tensors)
    make = lambda: learner(lambda: TabularModel([(4,3),(4,3)], 5, 3, [12,10,8], ps=.2, embed_p=.1), 8, ds)
    a,b,cb = check(make)
    assert [o.name for o in cb.segments]==['layers[:2]','layers[2:]']

def test_transformer():
    "Named inputs, some of them the same for all blocks"
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.att,self.norm = nn.MultiheadAttention(8, 2, dropout=.1, batch_first=True),nn.LayerNorm(8)
            self.ff = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(.1), nn.Linear(16, 8))
        def forward(self, x, *, mask=None, extra=()):
            x = x+self.att(x, x, x, attn_mask=mask, need_weights=False)[0]
            return x+self.ff(self.norm(x))+extra[0]['bias'],len(extra)
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.blocks = nn.Linear(5, 8),nn.ModuleList(Attends() for _ in range(4))
            self.bias,self.head = nn.Parameter(torch.zeros(8)),nn.Linear(8, 3)
        def forward(self, x):
            x,mask = self.embed(x)[:,None].repeat(1, 3, 1),torch.zeros(3, 3)
            for b in self.blocks: x,_ = b(x, mask=mask, extra=[dict(bias=self.bias)])
            return self.head(x.mean(1))
    a,b,cb = check(partial(learner, Encoder))
    assert [o.name for o in cb.segments]==[f'blocks.{i}' for i in range(4)]

@pytest.mark.parametrize('nm', ['GPT2LMHeadModel','BertForSequenceClassification'])
def test_transformers(nm):
    "GPT-2's blocks add to a cache that they are given"
    tf = pytest.importorskip('transformers')
    configs = dict(GPT2LMHeadModel=lambda: tf.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=16),
        BertForSequenceClassification=lambda: tf.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3,
            num_attention_heads=2, intermediate_size=32, num_labels=3))
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = getattr(tf, nm)(configs[nm]())
        def forward(self, x): return self.m(x)['logits']
    ds = Data(torch.randint(0, 50, (16,12), generator=torch.Generator().manual_seed(0)), data(16).tensors[1])
    a,b,cb = check(lambda: learner(Wrapper, 8, ds, lambda p,y: F.cross_entropy(p[:,0] if p.dim()==3 else p, y)))
    assert [o.kind in ('GPT2Block','BertLayer') for o in cb.segments].count(True)==3

@pytest.mark.parametrize('nm,n', [('mobilenetv3_small_050',14),('regnetx_002',6)])
def test_timm(nm, n):
    pytest.importorskip('timm')
    from fastai.vision.learner import create_timm_model
    a,b,cb = check(lambda: learner(lambda: create_timm_model(nm, 3, pretrained=False)[0], 4, images()), ran=False)
    assert len(cb.segments)==n and (cb.segments.again>3*cb.segments.kept or not tells)

def test_inputs_that_collect():
    "A list to which each block adds something, and a cache that counts"
    class Cache:
        n,values = 0,()
        def update(self, x): self.n,self.values = self.n+1,(*self.values,x)
    class Collects(Block):
        def forward(self, x, outs, cache):
            outs.append(x.detach().mean())
            cache.update(outs[-1])
            return super().forward(x*len(outs)+sum(cache.values)*cache.n)
    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.head = nn.Linear(5, 8),nn.Linear(8, 3)
            self.blocks = nn.ModuleList(Collects() for _ in range(3))
        def forward(self, x):
            x,outs,cache = self.embed(x),[],Cache()
            for b in self.blocks: x = b(x, outs, cache=cache)
            assert len(outs)==cache.n==len(cache.values)==3
            return self.head(x)
    check(partial(learner, Through))

# What moves in a forward pass, and must not move again

class Keeps(nn.Module):
    "Its result depends on what it keeps: an attribute, a list, an array; it draws numbers of all kinds"
    def __init__(self):
        super().__init__()
        self.lin,self.n,self.seen,self.array = nn.Linear(8, 8),0,[],np.zeros(2)
        self.gen = torch.Generator().manual_seed(0)
        self.state = None
    def forward(self, x):
        self.n += 1
        self.seen.append(random.random()+np.random.rand())
        self.array += 1
        old = 0 if self.state is None else self.state
        self.state = x.detach().mean()
        noise = torch.rand(x.shape, generator=self.gen)
        return self.lin(x).sin()*self.n+self.seen[-1]+len(self.seen)+self.array[0]+old+noise

class Average(nn.Module):
    "A buffer that is replaced, and one that is changed in place, on which its result depends"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer('mean', None)
        self.register_buffer('calls', torch.zeros(()))
    def forward(self, x):
        self.mean = x.detach().mean(0) if self.mean is None else .9*self.mean+.1*x.detach().mean(0)
        self.calls.add_(1)
        return self.lin(x-self.mean).tanh()*float(self.calls)

class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.lin,self.norm = nn.Linear(8, 8),norm
    def forward(self, x): return self.norm(self.lin(x)).tanh()

class Late(Normed):
    "Goes by the statistics that it has just moved"
    def forward(self, x):
        x = self.norm(self.lin(x))
        return (x*self.norm.running_mean+self.norm.running_var).tanh()

def image_norm(cls): return nn.Sequential(nn.Unflatten(1, (2,4)), cls(2, track_running_stats=True), nn.Flatten())

old_spectral = partial(nn.utils.spectral_norm, n_power_iterations=1)
moving = dict(batchnorm=lambda: Normed(nn.BatchNorm1d(8)), cumulative=lambda: Normed(nn.BatchNorm1d(8, momentum=None)),
    late=lambda: Late(nn.BatchNorm1d(8)), instance=lambda: Normed(image_norm(nn.InstanceNorm1d)),
    keeps=Keeps, average=Average,
    spectral=lambda: Normed(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
    old_spectral=lambda: Normed(old_spectral(nn.Linear(8, 8))),
    weight_norm=lambda: Normed(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))))

@pytest.mark.parametrize('nm', moving)
def test_what_moves(nm):
    make = moving[nm]
    a,b,cb = check(partial(learner, lambda: net(make(), make())), segments=(Normed,Keeps,Average))
    for x,y in zip(a.model, b.model):
        if isinstance(x, Keeps):
            assert (x.n,x.seen,x.state)==(y.n,y.seen,y.state) and (x.array==y.array).all()
            assert torch.equal(x.gen.get_state(), y.gen.get_state())

@pytest.mark.parametrize('nm', ['batchnorm','keeps','average','spectral'])
def test_a_module_that_runs_twice(nm):
    "Each of its runs is computed again from where it was"
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.block,self.other,self.head = nn.Linear(5, 8),moving[nm](),Block(),nn.Linear(8, 3)
        def forward(self, x):
            x = self.embed(x)
            return self.head(self.block(self.other(self.block(x))+self.block(x*2)))
    a,b,cb = check(partial(learner, Twice), segments=['block','other'])
    assert cb.segments[0].calls==3*cb.segments[1].calls

def test_modes_are_those_of_the_forward_pass():
    class Loss(Callback):
        def after_pred(self): self.model.eval()
        def after_batch(self): self.model.train(self.training)
    check(cbs=lambda: [Loss()])

@pytest.mark.parametrize('cls', [TensorImage,torch.Tensor])
def test_tensors_with_a_class_and_attributes(cls):
    "As fastai's: a `SequentialEx` hands the input on as an attribute"
    seen = []
    class Merge(Block):
        def forward(self, x):
            seen.append((type(x),recomputing()))
            return super().forward(x*x.orig)
    class Typed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers,self.head = nn.Linear(5, 8),nn.Linear(8, 3)
            self.more = SequentialEx(Block(), Merge(), Block())
        def forward(self, x): return TensorBase(self.head(self.more(self.layers(x).as_subclass(cls))))
    check(partial(learner, Typed), segments=Block)
    assert set(seen)=={(cls,False),(cls,True)}

def test_two_backward_passes():
    "Also of segments that change their inputs"
    def twice(learn, cbs):
        class Again(Callback):
            run_valid = False
            def before_backward(self): self.learn.loss_grad.backward(retain_graph=True)
        one_cycle(learn, [*cbs,Again()])
    check(fit=twice)
    check(partial(learner, lambda: net(Around(), Around())), segments=Front, fit=twice)

def test_gradient_of_a_gradient():
    class Penalty(Callback):
        run_valid = False
        def before_batch(self): self.learn.xb = (self.x.requires_grad_(),)
        def after_loss(self):
            g, = torch.autograd.grad(self.learn.loss_grad, self.x, create_graph=True)
            self.learn.loss_grad = self.learn.loss_grad+g.pow(2).sum()
    check(cbs=lambda: [Penalty()])

def test_a_model_with_checkpoints_of_its_own():
    class Own(Block):
        def forward(self, x): return x+checkpoint(super().forward, x, use_reentrant=False).sin()
    check(partial(learner, lambda: net(Own(), Own())))

# In place

class Front(nn.Module):
    "Begins in place, and so changes what it is given"
    def __init__(self):
        super().__init__()
        self.lin,self.drop = nn.Linear(8, 8),nn.Dropout()
    def forward(self, x): return self.lin(self.drop(x.mul_(1.5)))

class Around(nn.Module):
    "Goes on with what the block has made of its input"
    def __init__(self):
        super().__init__()
        self.lin,self.block = nn.Linear(8, 8),Front()
    def forward(self, x):
        x = self.lin(x)
        return self.block(x)+x

@pytest.mark.parametrize('offload', [False,True])
def test_an_input_that_is_changed_in_place(offload):
    a,b,cb = check(partial(learner, lambda: net(Around(), Around())), segments=Front, offload=offload)
    check(partial(learner, lambda: net(nn.Linear(8, 8), Front(), Front())), segments=Front, offload=offload,
        fit=lambda learn,cbs: learn.fit(1, 1e-2, cbs=cbs))

def test_an_input_that_is_changed_later():
    class Later(Around):
        def forward(self, x):
            x = self.lin(x)
            y = self.block(x)
            return y+x.mul_(2)
    class Add(nn.Module):   # needs no input for its backward pass, so that without checkpoints this works
        def __init__(self):
            super().__init__()
            self.bias,self.lin = nn.Parameter(torch.ones(8)),nn.Linear(8, 8)
        def forward(self, x): return self.lin(x+self.bias)
    def make():
        m = Later()
        m.block = Add()
        return net(m, Block())
    learner(make).fit(1)
    learn = learner(make)
    with pytest.raises(RuntimeError, match=r"input of segment '1.block'.*inplace=False"):
        learn.fit(1, cbs=ActivationCheckpoint(Add))
    assert not recomputing() and not any('forward' in vars(m) for m in learn.model.modules())

def test_an_input_that_is_changed_in_place_from_the_second_batch_on():
    class Second(Front):
        n = 0
        def forward(self, x):
            self.n += 1
            return self.lin(x.mul_(1.5) if self.n>1 else x)
    def make():
        m = Around()
        m.block = Second()
        return net(m, Block())
    with pytest.raises(RuntimeError, match=r"input of segment '1.block'.*inplace=False"):
        learner(make).fit(1, cbs=ActivationCheckpoint(Second))

def test_a_tensor_that_is_changed_in_place():
    class Bad(Block):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(8)
        def forward(self, x):
            self.total.add_(x.detach().sum(0))
            return super().forward(x)+self.total
    with pytest.raises(RuntimeError, match=r"`total`.*register_buffer\('total'"):
        learner(lambda: net(Bad(), Bad())).fit(1, cbs=ActivationCheckpoint())

def test_a_parameter_that_is_changed_before_the_backward_pass():
    class Early(Callback):
        def before_backward(self):
            with torch.no_grad(): self.model[1].lin1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="parameter of segment '1'"):
        learner().fit(1, cbs=[ActivationCheckpoint(),Early()])

# Others

def test_hooks_of_others():
    "What `ActivationStats` and fastai's hooks keep is what the forward pass gave them; a hook that counts can ask"
    stats = []
    def cbs():
        stats.append(ActivationStats(with_hist=True))
        return stats[-1:]
    def make():
        learn = learner()
        learn.seen,learn.asked = [],[]
        learn.hook = hook_output(learn.model[1].lin1, detach=False)
        learn.model[2].bn.register_forward_hook(lambda *_: learn.seen.append(1))
        learn.model[2].register_forward_hook(lambda *_: learn.asked.append(recomputing()))
        return learn
    class Same(Callback):
        "The very tensor, with its graph"
        def after_loss(self): self.kept = self.learn.hook.stored
        def after_backward(self): assert self.learn.hook.stored is self.kept
    a,b,cb = check(make, cbs=lambda: [*cbs(),Same()])
    for x,y in zip(*(o.stats for o in stats)): assert str(x)==str(y)
    assert [len(o.stats) for o in stats]==[5,5] and torch.equal(a.hook.stored, b.hook.stored)
    assert not any(b.asked) and len(a.asked)==len(b.asked)   # a segment's own
    n = len(a.seen)
    assert len(b.seen)==n+5   # of a module inside: a function that keeps something elsewhere hears training twice

def test_hooks_of_the_backward_pass():
    "Of a segment and of a module inside; and of tensors and parameters"
    heard = []
    def make():
        learn,mine = learner(),[]
        heard.append(mine)
        def hear(m, i, o): mine.append((type(m).__name__,o[0].sum().item()))
        for m in (learn.model[1],learn.model[2].drop): m.register_full_backward_hook(hear)
        learn.hook = hook_output(learn.model[3].lin1, grad=True)
        learn.model[2].lin2.weight.register_hook(lambda g: mine.append(g.norm().item()))
        return learn
    a,b,cb = check(make)
    assert heard[0]==heard[1] and len(heard[0])==3*5
    assert torch.equal(a.hook.stored[0], b.hook.stored[0])

def test_a_hook_that_alters():
    def make():
        learn = learner()
        learn.model[1].act.register_forward_hook(lambda m,i,o: o*2)
        learn.model[2].drop.register_forward_pre_hook(lambda m,i: (i[0]+1,))
        return learn
    check(make)

class HalfNet(nn.Sequential):
    def forward(self, x): return super().forward(x).float()

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_mixed_precision(mode):
    "Computed again in the precision of the forward pass, loss scaled"
    seen = []
    def make():
        learn = learner(lambda: HalfNet(*net()))
        learn.model[2].lin1.register_forward_hook(lambda m,i,o: seen.append((recomputing(),o.dtype)))
        return learn
    check(make, cbs=lambda: [CpuMixedPrecision(amp_mode=mode, init_scale=2.**8), GradientClip(.1)], segments=Block)
    half = dict(fp16=torch.float16, bf16=torch.bfloat16)[mode]
    assert {o for o in seen if o[0]}=={(True,half)}

def test_freezing():
    "A frozen body with BatchNorm that trains; a body in which nothing does, whose segments run plainly"
    make = lambda: learner(splitter=lambda m: [list(m[:3].parameters()),list(m[3:].parameters())])
    check(make, fit=lambda learn,cbs: learn.fine_tune(1, 1e-2, freeze_epochs=2, cbs=cbs))
    a,b,cb = check(partial(learner, train_bn=False, splitter=lambda m: [list(m[:4].parameters()),
        list(m[4:].parameters())]), fit=lambda learn,cbs: (learn.freeze(), learn.fit(1, 1e-2, cbs=cbs)), ran=False)
    assert [o.calls for o in cb.segments]==[5]*4
    assert [o.again is None for o in cb.segments]==[True]*3+[not tells]   # the head trains

def test_accumulation():
    "Micro-batches are checkpointed one by one"
    check(cbs=lambda: [GradientAccumulation(16), GradientClip(.1)])

class Saves(torch.autograd.Function):
    "The identity, which saves a tensor for its backward pass: `Held.now` knows how many samples are saved"
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.token = Held(len(x))
        ctx.save_for_backward(y)
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors
        return g

class Held:
    now,cap = 0,10**9
    def __init__(self, n):
        self.n = n
        Held.now += n
        if Held.now>Held.cap: raise torch.OutOfMemoryError('planted')
    def __del__(self): Held.now -= self.n

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
    def forward(self, x): return Saves.apply(self.lin(x).tanh())

@pytest.fixture
def cap():
    def put(n): Held.cap = n
    yield put
    put(10**9)

def large(**kwargs):
    return learner(lambda: nn.Sequential(nn.Linear(5, 8), *(Large() for _ in range(4)), nn.Linear(8, 3)), **kwargs)

def test_more_fits(cap):
    cap(40)
    found = [int(large(bs=4, ds=data(128), cbs=cbs).bs_find(show_plot=False)) for cbs in ([],[ActivationCheckpoint()])]
    assert found==[8,32]
    learn = large(bs=4, ds=data(128), cbs=ActivationCheckpoint())
    learn.bs_find(show_plot=False)
    assert not any('forward' in vars(m) for m in learn.model.modules()) and not learn.activation_checkpoint.entered

@pytest.mark.parametrize('n', [5,9])
def test_recovery_in_the_middle_of_computing_again(cap, n):
    "Memory runs out in the backward pass; the batch is split, and the step is that of the whole batch"
    runs = []
    for auto in (False,True):
        cap(n if auto else 10**9)
        learn = large(bs=16)
        learn.model.double()
        for dl in learn.dls: dl.dataset.tensors = (dl.dataset.tensors[0].double(),dl.dataset.tensors[1])
        learn.loss_func = lambda p,y: F.cross_entropy(p, y).float()
        at = []
        if auto: learn.model[1].register_forward_pre_hook(lambda m,i: at.append((len(i[0]),recomputing())))
        cbs = [ActivationCheckpoint(),GradientAccumulation(16, micro_batch_size='auto')]
        learn.fit(1, 1e-2, cbs=cbs if auto else [])
        runs.append(torch.cat([p.detach().flatten() for p in learn.model.parameters()]))
    assert (runs[0]-runs[1]).abs().max()<1e-6 and len(at)>3
    assert not any('forward' in vars(m) for m in learn.model.modules()) and not recomputing()

def test_lr_find():
    def fit(learn, cbs):
        for cb in cbs: learn.add_cb(cb)
        learn.lr_find(num_it=12, show_plot=False)
        learn.fit(1, 1e-2)
        learn.fit_one_cycle(1, 1e-2)
    check(fit=fit)

def test_less_is_held():
    from benchmarks.live import peak_of
    peaks = []
    for cbs in ([],[ActivationCheckpoint()]):
        learn = learner(lambda: net(*(Block() for _ in range(12))), bs=200, ds=data(200), cbs=cbs)
        for cb in cbs: learn('before_fit')
        x,y = learn.dls.train.dataset.tensors
        peaks.append(peak_of(lambda: F.cross_entropy(learn.model(x), y).backward()))
        for cb in cbs: learn('after_fit')
    assert peaks[1]<.5*peaks[0], peaks

# Nothing is left

class Fault(Exception): pass

@pytest.mark.parametrize('exc', [CancelFitException,Fault,KeyboardInterrupt])
@pytest.mark.parametrize('event', ['before_fit','before_epoch','after_pred','before_backward','after_step','after_fit'])
def test_interrupts(event, exc):
    "The callback given to `fit` is gone; one that stays begins anew with the next fit, and is not in the way before"
    for stays in (False,True):
        learn,cb = learner(),ActivationCheckpoint()
        if stays: learn.add_cb(cb)
        later = event in ('after_pred','before_backward','after_step')
        fault = Raise(event, exc, order=cb.order+1, at=int(later))
        try: learn.fit(1, cbs=[fault] if stays else [cb,fault])
        except exc: pass   # raised in `after_fit`, also what cancels the fit
        assert fault.raised and not recomputing()
        if not stays: assert not any('forward' in vars(m) for m in learn.model.modules())
        learn.validate()
        learn.fit(1)
        assert not any('forward' in vars(m) for m in learn.model.modules())

@pytest.mark.parametrize('exc', [Fault,KeyboardInterrupt])
def test_an_interrupt_while_it_is_computed_again(exc):
    "Buffers, attributes and generators are as before the backward pass"
    learn = learner(lambda: net(Keeps(), moving['average'](), moving['batchnorm']()))
    def fail(*_):
        if recomputing(): raise exc
    for m in learn.model[1:4]: m.lin.register_forward_hook(fail)
    notes = []
    def note():
        attrs = {k:copy.deepcopy(vars(learn.model[1])[k]) for k in ('n','seen','array','state')}
        return attrs,{k:v.clone() for k,v in learn.model.state_dict().items()},generators()
    class Note(Callback):
        def before_backward(self): notes.append(note())
    with pytest.raises(exc): learn.fit(1, cbs=[ActivationCheckpoint((Normed,Keeps,Average)),Note()])
    assert str(notes[0])==str(note()) and not recomputing()

def test_a_failure_before_it_is_computed_again():
    "There is no memory for a copy of a buffer: the module is as it was"
    m = nn.BatchNorm1d(8)
    m.n = 1
    held,other = moment.Held('m', [m]),moment.Held('other', [])
    m.n = 2
    m(torch.randn(4, 8))
    held.settle()
    with other:
        with held: assert m.n==1
        assert recomputing() and m.n==2   # the other one
    was = dict(m._buffers)
    held.buffers = {k:(*o[:2],None) for k,o in held.buffers.items()}
    with pytest.raises(AttributeError):
        with held: pass
    assert m.n==2 and all(m._buffers[k] is b for k,b in was.items()) and not recomputing()

def test_only_buffers_that_moved_are_held():
    m = nn.BatchNorm1d(8)
    m.register_buffer('mask', torch.ones(8))
    held = moment.Held('m', [m])
    m(torch.randn(4, 8))
    held.settle()
    assert {nm for _,nm in held.buffers}=={'running_mean','running_var','num_batches_tracked'}

def test_saved_in_the_middle_of_a_fit(tmp_path):
    "A model that is copied, pickled or exported by a callback trains plainly elsewhere"
    copies = []
    class Copies(Callback):
        run_valid = False
        def after_train(self):
            copies.append(copy.deepcopy(self.learn.model))
            copies.append(pickle.loads(pickle.dumps(self.learn.model)))
            self.learn.export(tmp_path/'learn.pkl')
            copies.append(load_learner(tmp_path/'learn.pkl'))
    learn = learner(cbs=ActivationCheckpoint(), loss_func=nn.CrossEntropyLoss())
    learn.fit(1, cbs=Copies())
    x,y = data().tensors
    for o in copies:
        model = getattr(o, 'model', o)
        assert all(m.forward.__self__ is m for m in model.modules() if 'forward' in vars(m))
        model.train()(x).sum().backward()
        assert not recomputing()
    loaded = copies[-1]
    loaded.dls,loaded.opt = learn.dls,None
    loaded.remove_cb(Copies)
    loaded.fit(1)
    assert (loaded.activation_checkpoint.segments.again>0)==tells
    assert not any('forward' in vars(m) for m in loaded.model.modules())

def test_a_copy_keeps_a_forward_of_its_own():
    "Which a module has, not its class"
    copies = []
    class Copy(Callback):
        def after_train(self): copies.append(pickle.loads(pickle.dumps(self.learn.model)))
    learn = learner()
    learn.model[1].forward = torch.zeros_like
    learn.fit(1, cbs=[ActivationCheckpoint(Block),Copy()])
    assert copies[0][1].forward is torch.zeros_like

def test_saved_by_others():
    check(cbs=lambda: [SaveModelCallback()], fit=lambda learn,cbs: learn.fit(3, cbs=cbs))

def test_validation_runs_plainly():
    learn,calls = learner(),[]
    learn.model[1].lin1.register_forward_hook(lambda *_: calls.append((learn.training,recomputing())))
    learn.fit(2, cbs=ActivationCheckpoint())
    assert {True,False}=={o[0] for o in calls} and (False,True) not in calls and (True,True) in calls
    cb = ActivationCheckpoint()
    learn.fit(1, cbs=cb)
    assert [o.calls for o in cb.segments]==[5]*4    # training batches, not those of validation

def test_a_fit_within_a_fit():
    class Within(Callback):
        def after_epoch(self):
            if self.learn.epoch==0 and not self.done:
                self.done = True
                n = self.learn.n_epoch
                self.learn.fit(1)
                self.learn.epoch,self.learn.n_epoch,self.rows = 0,n,cb.segments
        done = False
    learn,cb,within = learner(),ActivationCheckpoint(),Within()
    learn.fit(2, cbs=[cb,within])
    assert cb.segments is not within.rows and cb.segments[0].calls==5   # of the last epoch, which entered anew

# Refused

@pytest.mark.parametrize('segments', [3,'0.1',(),[],(1,),[nn.Linear(1, 1),3],[None],{}], ids=str)
def test_arguments(segments):
    with pytest.raises(TypeError, match='segments=.*give a class'): ActivationCheckpoint(segments)

def test_more_arguments():
    with pytest.raises(TypeError, match='offload=1'): ActivationCheckpoint(offload=1)

@pytest.mark.parametrize('segments,match', [(nn.LSTM,'chooses no module.*Block'),(['9'],"'9' is no module"),
    ([nn.Linear(1, 1)],'Linear given is no module'),(['1','1.bn'],"'1' and '1.bn'"),(['1','1'],'Block in common'),
    (lambda m: False,'chooses no module')], ids=str)
def test_segments_that_are_not_there(segments, match):
    learn = learner()
    before = copy.deepcopy(learn.model.state_dict())
    with pytest.raises(ValueError, match=match): learn.fit(1, cbs=ActivationCheckpoint(segments))
    for k,v in learn.model.state_dict().items(): assert torch.equal(v, before[k])

def test_nothing_to_cut():
    for make in (lambda: nn.Linear(5, 3),lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh())):
        with pytest.raises(ValueError, match='no segments were found'): learner(make).fit(1, cbs=ActivationCheckpoint())

def test_two_of_them():
    with pytest.raises(ValueError, match='two ActivationCheckpoint'):
        learner().fit(1, cbs=[ActivationCheckpoint(),ActivationCheckpoint()])

def test_models_it_was_not_tried_with():
    for wrap,match in ((nn.DataParallel,'distrib_ctx'),(partial(torch.compile, backend='eager'),'compiled')):
        with pytest.raises(ValueError, match=match): learner(lambda: wrap(net())).fit(1, cbs=ActivationCheckpoint())

def test_blocks_that_are_in_no_list():
    "In a wrapper; an attention that a block has twice makes no list of it"
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = Block(),Block()
        def forward(self, x): return self.b(self.a(x))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.s1,self.s2,self.head = nn.Linear(5, 8),Stage(),Stage(),nn.Linear(8, 3)
        def forward(self, x): return self.head(self.s2(self.s1(self.embed(x))))
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()
        def forward(self, x): return self.net(x)
    a,b,cb = check(partial(learner, Wrapper))
    assert [o.name for o in cb.segments]==['net.s1','net.s2']
    a,b,cb = check(partial(learner, lambda: net(Stage(), Stage())))
    assert [o.name for o in cb.segments]==['1','2','[3:]']

def test_a_segment_that_does_not_run():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used,self.idle,self.head = Block(),Block(),nn.Linear(8, 3)
            self.embed = nn.Linear(5, 8)
        def forward(self, x): return self.head(self.used(self.embed(x)))
    with pytest.warns(UserWarning, match="1 of 2 segments did not run.*'idle'"):
        learner(Idle).fit(1, cbs=ActivationCheckpoint(Block))
    with pytest.warns(UserWarning, match="1 of 1 segments did not run.*'idle'"):
        learner(Idle).fit(1, cbs=ActivationCheckpoint(['idle']))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner(Idle).fit(1, cbs=ActivationCheckpoint())   # found, not given: the head of a timm model, for one
        learner(Idle).fit(0, cbs=ActivationCheckpoint(Block))   # nothing has run

def test_giving_segments():
    "A class, several, modules, names, slices, a function: the outermost that fit"
    model = net()
    for segments,names in [(Block,['1','2','3']),((Block,nn.BatchNorm1d),['1','2','3','4']),([model[1],'3'],['1','3']),
        ([model[:2],model[2]],['[:2]','2']),(nn.ModuleList(model[1:3]),['1','2']),(L(model[3]),['3']),(model[2],['2']),
        (lambda m: isinstance(m, Block) and m is not model[2],['1','3'])]:
        cb = ActivationCheckpoint(segments)
        learner(lambda: model).fit(1, cbs=cb)
        assert [o.name for o in cb.segments]==names and (cb.segments.again>0)==tells

def test_the_table():
    "Before the fit where segments are, afterwards what they hold; what two segments share is kept once"
    learn = learner(lambda: net(*(Block() for _ in range(4))), cbs=ActivationCheckpoint(Block))
    assert 'first batch' in repr(learn.activation_checkpoint.segments)
    learn.fit(1)
    rows = learn.activation_checkpoint.segments
    # inputs; inside: lin1's result, ReLU's (in place of BatchNorm's), dropout's mask and result, and two statistics
    assert [o.kept for o in rows]==[8*8*4]*4 and [o.again for o in rows]==[(4*8*8+2*8)*4 if tells else None]*4
    assert 'segments: 4.' in repr(rows)
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.c = Block(),Block(),nn.Linear(8, 3)
            self.embed = nn.Linear(5, 8)
        def forward(self, x):
            x = self.embed(x)
            return self.c(self.a(x)+self.b(x))
    learn = learner(Shared, cbs=ActivationCheckpoint())
    learn.fit(1)
    assert [o.kept for o in learn.activation_checkpoint.segments]==[8*8*4,0]

# Several processes

def on_several_processes():
    "The same on each process, with and without checkpoints, for several ways to wrap the model"
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group('gloo')
    rank,world = dist.get_rank(),dist.get_world_size()
    class Unused(nn.Sequential):
        "In each batch another block is left out"
        n = 0
        def forward(self, x):
            self.n += self.training
            for i,m in enumerate(self):
                if i!=1+self.n%3: x = m(x)
            return x
    for kwargs in (dict(), dict(find_unused_parameters=True), dict(static_graph=True)):
        cls = Unused if 'find_unused_parameters' in kwargs else nn.Sequential
        def make():
            learn = learner(lambda: cls(*net()), ds=data(40, seed=rank), bs=8)
            learn.model = DDP(learn.model, **kwargs)
            return learn
        for more in ([],[GradientAccumulation(16*world)]):   # of all processes
            if more and kwargs.get('static_graph'): continue
            cbs = lambda: [type(o)(16*world) for o in more]
            a,b,cb = check(make, cbs=cbs, segments=Block, offload='static_graph' in kwargs)
            assert [o.name for o in cb.segments]==['1','2','3']
            total = sum(p.double().sum() for p in b.model.parameters())
            sums = [torch.zeros_like(total) for _ in range(world)]
            dist.all_gather(sums, total.detach())
            assert all(o==sums[0] for o in sums), 'the processes have other weights'
    dist.destroy_process_group()
    Path(f'{rank}.passed').touch()

@pytest.mark.parametrize('n', [2,3])
def test_several_processes(tmp_path, n):
    env = os.environ | dict(OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='', PYTHONPATH=os.pathsep.join(sys.path))
    cmd = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(n), __file__]
    res = subprocess.run(cmd, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert sorted(o.name for o in tmp_path.glob('*.passed'))==[f'{r}.passed' for r in range(n)], res.stderr[-3000:]

if __name__=='__main__': on_several_processes()
