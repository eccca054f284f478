"""Learners as fastai users build them: trained on micro-batches, they are what full batches make of them.

In double precision, which tells the same run from a similar one. What is no part of the promise is taken out of the
models: BatchNorm becomes GroupNorm, or its statistics are frozen, and dropout is 0. Loaders make their items in this
process, in an order that does not depend on the batch size; so augmentation by item is the same, and a GAN's noise.
"""
import numpy as np, pandas as pd, pytest, torch
from collections import UserDict
from functools import partial
from random import Random
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import BnFreeze
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.block import CategoryBlock, DataBlock, TransformBlock
from fastai.data.core import DataLoaders, TfmdDL
from fastai.data.load import DataLoader
from fastai.layers import NormType
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import Perplexity, accuracy
from fastai.optimizer import Adam, SGD
from fastai.tabular.core import Categorify, FillMissing, Normalize
from fastai.tabular.data import TabularDataLoaders
from fastai.tabular.learner import tabular_learner
from fastai.tabular.model import tabular_config
from fastai.text.core import BaseTokenizer
from fastai.text.data import TextBlock
from fastai.text.learner import language_model_learner, text_classifier_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config
from fastai.torch_core import apply, set_seed
from fastai.vision.augment import RandomResizedCrop
from fastai.vision.data import ImageBlock, MaskBlock
from fastai.vision.gan import (AdaptiveGANSwitcher, AdaptiveLoss, FixedGANSwitcher, GANDiscriminativeLR, GANLearner,
    basic_critic, basic_generator, generate_noise)
from fastai.vision.learner import unet_learner, vision_learner
from fastcore.basics import noop
from fastaccum import GradientAccumulation
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, deviation
from common import Raise, shake, weights

class Double(Callback):
    "Cast the batch to double precision"
    order = -50
    def before_batch(self):
        def cast(o):
            if isinstance(o, torch.Tensor) and o.is_floating_point(): return o.double()
            return o.long() if getattr(o, 'dtype', None)==torch.int8 else o
        self.learn.xb,self.learn.yb = apply(cast, tuple(self.xb)),apply(cast, tuple(self.yb))

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def in_double(learn):
    learn.model.double()
    return quiet(learn.add_cbs([Double(),Float32Loss()]))

def groupnorm(m):
    "`m` with GroupNorm, which knows only the sample, in place of BatchNorm"
    for nm,o in m.named_children():
        if isinstance(o, nn.modules.batchnorm._BatchNorm): setattr(m, nm, nn.GroupNorm(1, o.num_features))
        else: groupnorm(o)
    return m

def exact(learn):
    learn.model = groupnorm(learn.model)
    return in_double(learn)

def both(make, fit, micro=4, macro=16, cbs=list, prepare=exact, **kwargs):
    "Two Learners from `make`, which is given a batch size: one trained on batches of `macro`, one on micro-batches"
    def run(bs, own):
        set_seed(0)
        learn = prepare(make(bs))
        before = weights(learn)
        set_seed(1)
        fit(learn, own+cbs())
        assert not weights(learn).allclose(before, atol=1e-4)
        return learn
    return run(macro, []),run(micro, [GradientAccumulation(macro, **kwargs)])

def one_cycle(learn, cbs): learn.fit_one_cycle(2, 1e-3, cbs=cbs)
def fine_tune(learn, cbs): learn.fine_tune(1, 1e-3, cbs=cbs)
def constant(learn, cbs): learn.fit(2, 1e-3, cbs=cbs)
def two_fits(learn, cbs):
    learn.fit(1, 1e-3, cbs=cbs)
    learn.fit_flat_cos(1, 1e-3, cbs=cbs)

# Pictures

rng = np.random.default_rng(0)
pixels,masks = rng.integers(0, 255, (40,16,16,3), dtype='uint8'),rng.integers(0, 3, (40,16,16), dtype='uint8')
masks[:,:4] = np.where(rng.random((40,4,16))<0.5, 255, masks[:,:4])   # pixels without a label

def loaders(bs, *blocks, get_x=pixels.__getitem__, **kwargs):
    "32 items for training, 8 for validation; fastai's training loaders drop an incomplete last batch"
    block = DataBlock(blocks, get_x=get_x, splitter=lambda _: (range(32),range(32, 40)), **kwargs)
    return block.dataloaders(range(40), bs=bs, val_bs=8, num_workers=0, device='cpu')

def half_resnet(pretrained=False): return nn.Sequential(*list(resnet18().children())[:6], nn.AdaptiveAvgPool2d(1))

def vision(bs, arch=half_resnet, **kwargs):
    dls = loaders(bs, ImageBlock, CategoryBlock, get_y=lambda i: 'abc'[i%3],
        item_tfms=RandomResizedCrop(16, min_scale=0.5))
    return vision_learner(dls, arch, pretrained=False, metrics=accuracy, **kwargs)

def segmenter(bs, loss_func=CrossEntropyLossFlat(axis=1, ignore_index=255)):
    dls = loaders(bs, ImageBlock, MaskBlock(codes=['a','b','c']), get_y=masks.__getitem__)
    return unet_learner(dls, half_resnet, pretrained=False, n_out=3, loss_func=loss_func)

def segmenter_in_double(bs):
    learn = segmenter(bs, nn.CrossEntropyLoss(ignore_index=255))
    learn.model.layers = learn.model.layers[:-1]   # `ToTensorBase`, which makes single precision of double
    return learn

def frozen(learn, cbs):
    learn.freeze()
    learn.fit_one_cycle(2, 1e-2, cbs=[*cbs,BnFreeze()])

def linear(n): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 3))

# Text

words = [f'w{i}' for i in rng.integers(0, 30, 40*12)]

def texts(bs, is_lm, sizes=(12,), dl_type=None, seq_len=6, **kwargs):
    "40 texts, of these numbers of words in turn"
    df = pd.DataFrame([dict(text=' '.join(words[i*12:][:sizes[i%len(sizes)]]), label='ab'[i%2]) for i in range(40)])
    text = TextBlock.from_df('text', is_lm=is_lm, seq_len=seq_len, min_freq=1, tok=BaseTokenizer(), rules=[], n_workers=0)
    block = DataBlock((text,) if is_lm else (text,CategoryBlock), get_x=lambda r: r.text,
        get_y=None if is_lm else lambda r: r.label, splitter=lambda _: (range(32),range(32, 40)))
    return block.dataloaders(df, bs=bs, num_workers=0, device='cpu', dl_type=dl_type, **kwargs)

small = dict(emb_sz=8, n_hid=10, n_layers=2)
# with `weight_p` of 0, fastai 2.8.12 fails on a CPU (`F.dropout` returns the parameter itself)
no_dropout = dict(small, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-30)

def sentiment(bs):
    """All texts are of one length and come in the order of a plain loader: fastai's `SortedDL` shuffles whole
    batches, so that with another batch size it makes other batches, and pads a text to the longest in its batch"""
    return text_classifier_learner(texts(bs, False, dl_type=TfmdDL), AWD_LSTM, config=awd_lstm_clas_config|no_dropout,
        pretrained=False, drop_mult=1., ps=[0.], loss_func=CrossEntropy(), metrics=accuracy)

class Windows(nn.Module):
    "A language model that reads windows of `size` one after the other, and remembers, as it does from batch to batch"
    def __init__(self, model, size): super().__init__(); self.model,self.size = model,size
    def __getitem__(self, i): return self.model[i]
    def reset(self): self.model.reset()
    def forward(self, x):
        pred,*acts = zip(*(self.model(o) for o in x.split(self.size, dim=1)))
        return torch.cat(pred, 1),*(torch.cat(o, 1) for o in acts)

def language(dls, **kwargs):
    learn = language_model_learner(dls, AWD_LSTM, config=awd_lstm_lm_config|no_dropout, pretrained=False,
        metrics=Perplexity(), **kwargs)
    learn.loss_func = CrossEntropy()
    return learn

def windows(bs):
    """`LMDataLoader` cuts the corpus into as many streams as a batch has rows. Micro-batches are windows of the same
    streams, one after the other, so the full batch has not more rows: it has windows four times as long, of which the
    model reads a quarter at a time. `beta`, a penalty on neighbours, is off: at the seam of two windows there are none"""
    k = bs//4
    dls = texts(4, True, seq_len=6*k)
    dls.loaders[1] = texts(4, True).valid   # fastai weighs validation batches by rows, short windows like long ones
    learn = language(dls, alpha=2., beta=0.)
    if k>1: learn.model = Windows(learn.model, 6)
    return learn

# Tables

def table(bs, n=32, drop_last=True, config=tabular_config(use_bn=False, bn_cont=False), loss_func=CrossEntropy()):
    r = np.random.default_rng(0)
    df = pd.DataFrame(r.normal(size=(n+16,3)), columns=list('abc')).assign(kind=r.choice(['x','y'], n+16))
    df = df.assign(y=r.integers(0, 3, n+16).astype(str))
    df.loc[::7,'a'] = np.nan
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,FillMissing,Normalize], cat_names=['kind'],
        cont_names=list('abc'), y_names='y', y_block=CategoryBlock(), valid_idx=list(range(n, n+16)), bs=bs,
        drop_last=drop_last, num_workers=0, device='cpu')
    return tabular_learner(dls, layers=[20,10], config=config, loss_func=loss_func, metrics=accuracy)

def rating_loss(p, y): return F.mse_loss(p.flatten(), y.flatten())   # fastai's is in single precision

def ratings(bs, loss_func=rating_loss, **kwargs):
    r = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=r.integers(0, 9, 60), item=r.integers(0, 12, 60), rating=r.integers(1, 11, 60)/2))
    dls = CollabDataLoaders.from_df(df, valid_pct=0.2, seed=0, bs=bs, num_workers=0, device='cpu')
    return collab_learner(dls, n_factors=5, y_range=(0,5.5), loss_func=loss_func, **kwargs)

def decayed(learn, cbs): learn.fit_one_cycle(2, 5e-3, wd=0.1, cbs=cbs)

# Batches of lists and mappings

def of_dataset(bs, model, loss_func, create_batch, item, n=40):
    gen = torch.Generator().manual_seed(0)
    ds = [item(i, gen) for i in range(n+8)]
    train,valid = (DataLoader(o, bs=bs if s else 8, shuffle=s, create_batch=create_batch)
        for o,s in ((ds[:n],True),(ds[n:],False)))
    return Learner(DataLoaders(train, valid, device='cpu'), model, loss_func=loss_func)

class Detector(nn.Module):
    "Five boxes for each of the pictures, which may be a batch or a list"
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(24, 20))
    def forward(self, xs): return torch.cat([self.body(x[None]) for x in xs]).view(-1, 5, 4)

def box_loss(preds, targs):
    "The mean over pictures of the mean over their boxes"
    return torch.stack([torch.cdist(t['boxes'], p, p=1).min(1).values.mean() for p,t in zip(preds, targs)]).mean()

def collated(items): return torch.stack([x for x,_ in items]),[y for _,y in items]
def listed(items): return [x for x,_ in items],[y for _,y in items]

def detection(bs, create_batch, n=38):
    "A picture has 1 to 9 boxes, which are no samples. In a list, pictures have any size, as for torchvision's detectors"
    def item(i, gen):
        x = torch.randn(3, 8, 8+i%3*(create_batch is listed), generator=gen)
        return x,dict(boxes=torch.rand(1+i%9, 4, generator=gen), labels=torch.ones(1+i%9).long())
    return of_dataset(bs, Detector(), box_loss, create_batch, item, n)

class Encoding(UserDict):
    "A mapping which is no `dict`, like transformers' BatchEncoding"
    def __getattr__(self, k):
        if k=='data' or k not in self.data: raise AttributeError(k)
        return self.data[k]

class Tagger(nn.Module):
    """Takes what a tokenizer returns by name, and returns scores; given labels, a mapping with the scores and the loss,
    as transformers' models do"""
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.head = nn.Embedding(20, 8),nn.GRU(8, 8, batch_first=True),nn.Linear(8, 3)
    def forward(self, batch): return self.named(**batch)
    def named(self, input_ids, attention_mask, labels=None, **kwargs):
        logits = self.head(self.rnn(self.emb(input_ids)*attention_mask[...,None])[0])
        if labels is None: return logits
        return dict(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

def tagged(bs, kind, with_labels=False, n=38):
    "2 to 7 of the tokens of a sample are real, the others' labels are -100"
    def item(i, gen):
        real = torch.arange(7)<2+i%6
        labels = torch.randint(0, 3, (7,), generator=gen).masked_fill(~real, -100)
        x = dict(input_ids=torch.randint(0, 20, (7,), generator=gen), attention_mask=real.long())
        return (dict(x, labels=labels) if with_labels else x),labels
    def create_batch(items):
        return kind({k:torch.stack([x[k] for x,_ in items]) for k in items[0][0]}),torch.stack([y for _,y in items])
    loss_func = (lambda out,y: out['loss']) if with_labels else CrossEntropy()
    return of_dataset(bs, Tagger(), loss_func, create_batch if kind else None, item, n)

def tokens(learn): return (learn.yb[0]!=-100).sum()

# GANs: 8 steps of 4 samples in an epoch

critic = partial(basic_critic, 16, 3, n_features=8, norm_type=NormType.Instance)
common = dict(opt_func=partial(Adam, mom=0.))

def wgan(bs, switcher=noop, **kwargs):
    dls = loaders(bs, TransformBlock, ImageBlock, get_x=partial(generate_noise, size=6), get_y=pixels.__getitem__)
    generator = basic_generator(16, 3, in_sz=6, n_features=8, norm_type=NormType.Instance)
    return GANLearner.wgan(dls, generator, critic(), switcher=switcher(), **common, **kwargs)

def from_learners(bs, switcher=noop, **kwargs):
    "A generator of pictures from pictures, and a critic, that were Learners before"
    dls = loaders(bs, ImageBlock, ImageBlock, get_x=lambda i: pixels[i]//2, get_y=pixels.__getitem__)
    generator = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1))
    crit_loss = AdaptiveLoss(lambda p,t: F.binary_cross_entropy_with_logits(p, t.double()))
    return GANLearner.from_learners(Learner(dls, generator, loss_func=nn.MSELoss()),
        Learner(dls, critic(), loss_func=crit_loss), switcher=switcher(), weights_gen=(1.,50.), **common, **kwargs)

few = partial(wgan, switcher=lambda: FixedGANSwitcher(2, 1))

def with_columns(make, bs):
    learn = make(bs)
    learn.recorder.train_metrics = True
    return learn

class Penalty(Callback):
    "A penalty on the critic, which is in the loss and in its gradient, but not in what the table shows as `crit_loss`"
    run_valid = False
    def after_loss(self):
        if self.gan_trainer.gen_mode: return
        penalty = 0.1*self.pred.square().mean()
        self.learn.loss_grad,self.learn.loss = self.loss_grad+penalty,self.loss+penalty.detach().float()

def after_lr_find(learn, cbs):
    with learn.added_cbs(cbs): learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
    two_fits(learn, cbs)

gans = dict(wgan=dict(make=wgan), few=dict(make=few, fit=two_fits),
    calls=dict(make=partial(wgan, switcher=lambda: FixedGANSwitcher(lambda n: 1+n, 1))),
    from_learners=dict(make=partial(from_learners, gen_first=True)),
    adaptive=dict(make=partial(from_learners, switcher=lambda: AdaptiveGANSwitcher(critic_thresh=0.65)), fit=two_fits),
    thresholds=dict(make=partial(from_learners,
        switcher=lambda: AdaptiveGANSwitcher(gen_thresh=5.5, critic_thresh=0.65))),
    rates=dict(make=lambda bs: few(bs, cbs=GANDiscriminativeLR(3.)), fit=constant),
    rates_in_fit=dict(make=few, fit=constant, cbs=lambda: [GANDiscriminativeLR(3.)]),
    penalty=dict(make=few, cbs=lambda: [Penalty()]), lr_find=dict(make=few, fit=after_lr_find))
gans = {nm:dict(fit=one_cycle, micro=2, macro=8)|o for nm,o in gans.items()}

# The law

apps = dict(
    vision=dict(make=partial(vision, ps=0., loss_func=CrossEntropy()), fit=fine_tune),
    vision_frozen=dict(make=lambda bs: vision(bs, custom_head=linear(128), train_bn=False, loss_func=CrossEntropy()),
        fit=frozen, prepare=in_double),
    unet=dict(make=segmenter_in_double, fit=fine_tune),
    text=dict(make=sentiment, fit=fine_tune),
    language=dict(make=windows, fit=two_fits, drop_last=False),   # the last step has fewer and shorter windows
    language_that_is_split=dict(make=lambda bs: language(texts(16, True), alpha=2., beta=1.), micro_batch_size=4),
    table=dict(make=table, macro=8, fit=two_fits),
    table_with_a_short_end=dict(make=partial(table, n=39, drop_last=False)),
    table_without_its_end=dict(make=partial(table, n=45), drop_last=True),
    collab=dict(make=ratings, fit=decayed),
    collab_nn=dict(make=partial(ratings, use_nn=True, layers=[8], config=tabular_config(use_bn=False)), fit=decayed),
    detection=dict(make=partial(detection, create_batch=collated)),
    detection_in_lists=dict(make=partial(detection, create_batch=listed)),
    hugging_collated=dict(make=partial(tagged, kind=None)),
    hugging_dict=dict(make=partial(tagged, kind=dict)),
    hugging=dict(make=partial(tagged, kind=Encoding)),
    hugging_loss=dict(make=partial(tagged, kind=Encoding, with_labels=True), size=tokens))

@pytest.mark.parametrize('nm', apps)
def test_an_application_trains_as_on_full_batches(nm): assert_twins(*both(**{'fit':one_cycle, **apps[nm]}))

def assert_same_gan(a, b):
    "The same run, in which both critic and generator have trained"
    assert_twins(a, b)
    for nm in ('gen_losses','crit_losses'):
        x,y = (getattr(o.gan_trainer, nm) for o in (a,b))
        assert len(x)==len(y)>0 and deviation(x, y)<2e-6, nm

@pytest.mark.parametrize('nm', gans)
def test_a_gan_takes_turns_by_steps(nm):
    "Each step is the critic's or the generator's alone, and the table's columns are means over steps"
    a,b = both(**{**gans[nm], 'make':partial(with_columns, gans[nm]['make'])})
    assert_same_gan(a, b)
    assert b.recorder.metric_names[2:4]==['train_gen_loss','train_crit_loss']

@pytest.mark.parametrize('nm', ['few','adaptive'])
def test_what_is_logged_of_a_gan_decides_nothing(nm):
    a,b = both(**gans[nm], log_accum_batch=False)
    assert deviation(a.model.state_dict(), b.model.state_dict())<1e-7
    assert len(b.gan_trainer.crit_losses)==4*len(a.gan_trainer.crit_losses)

class Short(Callback):
    "Memory that holds no more than 3 samples of a training batch"
    run_valid = False
    def after_pred(self):
        if len(self.pred)>3: raise torch.OutOfMemoryError('planted')

def test_a_gan_whose_batches_are_split():
    def fit(learn, own): two_fits(learn, own+[Short()]*bool(own))
    assert_same_gan(*both(lambda bs: few(8), fit, micro=2, macro=8, micro_batch_size='auto'))

def test_a_gan_with_an_incomplete_last_batch():
    "The loader yields 30 samples: the last of 4 steps is on 6"
    def make(bs):
        learn = few(bs)
        learn.dls.train.n,learn.dls.train.drop_last = 30,False
        return learn
    a,b = both(make, two_fits, micro=2, macro=8, drop_last=False)
    assert_same_gan(a, b)
    assert len(b.recorder.losses)==4

@pytest.mark.parametrize('event', ['before_batch','after_backward','after_step'])
@pytest.mark.parametrize('at', [1,3])
def test_a_plain_fit_of_a_gan_after_an_interrupt_is_plain(event, at):
    set_seed(0)
    fresh,learn = (exact(few(4)) for _ in range(2))
    cbs = [GradientAccumulation(8),Raise(event, KeyboardInterrupt, order=-20, at=at)]
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 1e-3, cbs=cbs)
    learn.opt.clear_state()   # no `reset_opt`, which would leave out those that are not trained at the moment
    learn.model.zero_grad()   # fastai's leaves zeros, with which its optimizers still move momentum
    fresh.model.load_state_dict(learn.model.state_dict())
    for o in (fresh,learn):
        set_seed(2)
        o.dls.train.rng = Random(2)
        o.fit(1, 1e-3)
    assert_same_gan(fresh, learn)
    assert len(learn.gan_trainer.crit_losses)+len(learn.gan_trainer.gen_losses)==8

# In single precision

def smooth(pretrained=False):
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Tanh(), nn.Conv2d(4, 8, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1))

own_losses = dict(vision=lambda bs: vision(bs, smooth, custom_head=linear(8)), collab=partial(ratings, loss_func=None),
    table=partial(table, config=tabular_config(use_bn=False, bn_cont=False, act_cls=nn.Tanh()), loss_func=None))

@pytest.mark.parametrize('nm', own_losses)
def test_fastais_own_losses_differ_by_rounding_only(nm):
    "With SGD, since Adam makes a step of full length of a tiny gradient that is rounding"
    def run(bs, own, change=noop):
        set_seed(0)
        learn = quiet(own_losses[nm](bs))
        learn.opt_func = SGD
        change(learn.model)
        set_seed(1)
        learn.fit_one_cycle(2, 1e-2, cbs=own)
        return learn
    a,b,*shaken = run(16, []),run(4, [GradientAccumulation(16)]),*(run(16, [], partial(shake, seed=i)) for i in range(3))
    assert deviation(weights(a), weights(b))<=10*max(deviation(weights(a), weights(o)) for o in shaken)
    assert deviation(a.recorder.losses, b.recorder.losses)<2e-6
