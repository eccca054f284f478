"""Learners as fastai users build them get the same weights from micro-batches as from full batches.

The runs are in double precision, so that rounding is much smaller than the difference of a wrong run.
Layers whose results depend on the batch size by design are replaced: BatchNorm becomes GroupNorm, and
dropout is 0. Loaders make their items in this process, in an order that does not depend on the batch
size, so that the augmentation of items and the noise of a GAN are the same. Tests with BatchNorm, and
with the losses of fastai in single precision, are in `test_warnings_are_true.py`.
"""
import numpy as np, pandas as pd, pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularDataLoaders, tabular_config, tabular_learner
from fastai.text.all import (AWD_LSTM, BaseTokenizer, TextBlock, awd_lstm_clas_config, awd_lstm_lm_config,
    language_model_learner, text_classifier_learner)
from fastai.vision.all import (Adam, Callback, CategoryBlock, CrossEntropyLossFlat, DataBlock, DataLoader,
    DataLoaders, ImageBlock, Learner, MaskBlock, Module, NormType, RandomResizedCrop, TfmdDL,
    TransformBlock, accuracy, apply, noop, set_seed, unet_learner, vision_learner)
from fastai.vision.gan import (AdaptiveGANSwitcher, FixedGANSwitcher, GANDiscriminativeLR, GANLearner,
    basic_critic, basic_generator, generate_noise)
from fastaccum import GradientAccumulation
from fastaccum.testing import CrossEntropy, assert_same_run, deviation
from common import RecordAt, raise_oom_above, weights
from small_learners import MappingBatch, silence_in_double

class Double(Callback):
    "Casts the numbers of a batch to double precision, and targets of 8 bits to integers of 64 bits"
    order = -50
    def before_batch(self):
        def cast(o):
            if isinstance(o, torch.Tensor) and o.is_floating_point(): return o.double()
            return o.long() if getattr(o, 'dtype', None)==torch.int8 else o
        self.learn.xb,self.learn.yb = apply(cast, tuple(self.xb)),apply(cast, tuple(self.yb))

def in_double(learn): return silence_in_double(learn.add_cb(Double()))

def groupnorm_in(learn):
    "Replace BatchNorm by GroupNorm, which normalizes each sample by itself, and return the Learner"
    for m in list(learn.model.modules()):
        for nm,o in m.named_children():
            if isinstance(o, nn.modules.batchnorm._BatchNorm): setattr(m, nm, nn.GroupNorm(1, o.num_features))
    return learn

def one_cycle(learn, cbs): learn.fit_one_cycle(2, 1e-3, cbs=cbs)
def fine_tune(learn, cbs): learn.fine_tune(1, 1e-3, cbs=cbs)
def two_fits(learn, cbs):
    learn.fit(1, 1e-3, cbs=cbs)
    learn.fit_flat_cos(1, 1e-3, cbs=cbs)

def both(make, fit=one_cycle, micro=4, full=16, cbs=list, **kwargs):
    "Return two Learners from `make(bs)`, trained on batches of `full` and on micro-batches of `micro`"
    def run(bs, acc):
        set_seed(0)
        learn = in_double(groupnorm_in(make(bs)))
        before = weights(learn)
        set_seed(1)
        fit(learn, acc+cbs())
        assert not weights(learn).allclose(before, atol=1e-4)
        return learn
    return run(full, []),run(micro, [GradientAccumulation(full, **kwargs)])

# Pictures

rng = np.random.default_rng(0)
pixels,masks = rng.integers(0, 255, (40,16,16,3), dtype='uint8'),rng.integers(0, 3, (40,16,16), dtype='uint8')
masks[:,:4] = np.where(rng.random((40,4,16))<0.5, 255, masks[:,:4])   # 255 marks pixels without a label

def loaders(bs, *blocks, get_x=pixels.__getitem__, **kwargs):
    "Return loaders of 32 items for training and 8 for validation"
    block = DataBlock(blocks, get_x=get_x, splitter=lambda _: (range(32),range(32, 40)), **kwargs)
    return block.dataloaders(range(40), bs=bs, val_bs=8, num_workers=0, device='cpu')

def half_resnet(pretrained=False, n=6): return nn.Sequential(*list(resnet18().children())[:n], nn.AdaptiveAvgPool2d(1))
def linear(n): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 3))

def vision(bs, arch=half_resnet, **kwargs):
    dls = loaders(bs, ImageBlock, CategoryBlock, get_y=lambda i: 'abc'[i%3],
        item_tfms=RandomResizedCrop(16, min_scale=0.5))
    return vision_learner(dls, arch, pretrained=False, metrics=accuracy, **kwargs)

def segmenter(bs, loss_func=CrossEntropyLossFlat(axis=1, ignore_index=255)):
    dls = loaders(bs, ImageBlock, MaskBlock(codes=['a','b','c']), get_y=masks.__getitem__)
    return unet_learner(dls, partial(half_resnet, n=5), pretrained=False, n_out=3, loss_func=loss_func)

def segmenter_in_double(bs):
    learn = segmenter(bs, nn.CrossEntropyLoss(ignore_index=255))
    # remove `ToTensorBase`, which casts double to single precision
    learn.model.layers = learn.model.layers[:-1]
    return learn

# Text

words = [f'w{i}' for i in rng.integers(0, 30, 40*12)]

def texts(bs, is_lm, sizes=(12,), dl_type=None, seq_len=6):
    """Return loaders of 40 texts

    `sizes` has the numbers of words of the first texts, and repeats for the next texts.
    """
    df = pd.DataFrame([dict(text=' '.join(words[i*12:][:sizes[i%len(sizes)]]), label='ab'[i%2]) for i in range(40)])
    text = TextBlock.from_df('text', is_lm=is_lm, seq_len=seq_len, min_freq=1, tok=BaseTokenizer(), rules=[],
        n_workers=0)
    block = DataBlock((text,) if is_lm else (text,CategoryBlock), get_x=lambda r: r.text,
        get_y=None if is_lm else lambda r: r.label, splitter=lambda _: (range(32),range(32, 40)))
    return block.dataloaders(df, bs=bs, num_workers=0, device='cpu', dl_type=dl_type)

small = dict(emb_sz=8, n_hid=10, n_layers=2)
# with `weight_p` of 0, fastai 2.8.12 fails on a CPU (`F.dropout` returns the parameter itself)
no_dropout = dict(small, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-30)

def sentiment(bs):
    "Return a text classifier without `SortedDL`, whose order depends on the batch size"
    return text_classifier_learner(texts(bs, False, dl_type=TfmdDL), AWD_LSTM, config=awd_lstm_clas_config|no_dropout,
        pretrained=False, drop_mult=1., ps=[0.], loss_func=CrossEntropy(), metrics=accuracy)

def language(_):
    """Return a language model with batches of 16, to be split

    Smaller batches of the loader would have other texts.
    """
    learn = language_model_learner(texts(16, True), AWD_LSTM, config=awd_lstm_lm_config|no_dropout, pretrained=False)
    learn.loss_func = CrossEntropy()
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

# fastai's loss casts to single precision
def rating_loss(p, y): return F.mse_loss(p.flatten(), y.flatten())

def ratings(bs, loss_func=rating_loss, **kwargs):
    r = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=r.integers(0, 9, 60), item=r.integers(0, 12, 60), rating=r.integers(1, 11, 60)/2))
    dls = CollabDataLoaders.from_df(df, valid_pct=0.2, seed=0, bs=bs, num_workers=0, device='cpu')
    return collab_learner(dls, n_factors=5, y_range=(0,5.5), loss_func=loss_func, **kwargs)

# Batches of lists and mappings

def learner_of_items(bs, model, loss_func, create_batch, item, n):
    "Return a Learner that trains on `n` items, each made by `item(i, random_generator)`"
    gen = torch.Generator().manual_seed(0)
    ds = [item(i, gen) for i in range(n+8)]
    dls = [DataLoader(ds[:n], bs=bs, shuffle=True, create_batch=create_batch),
        DataLoader(ds[n:], bs=8, create_batch=create_batch)]
    return Learner(DataLoaders(*dls, device='cpu'), model, loss_func=loss_func)

class Detector(Module):
    "Returns five boxes for each picture of a list"
    def __init__(self):
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(24, 20))
    def forward(self, xs): return torch.cat([self.body(x[None]) for x in xs]).view(-1, 5, 4)

def box_loss(preds, targs):
    "Return the mean over pictures of the mean distance of a target box to the nearest predicted box"
    return torch.stack([torch.cdist(t['boxes'], p, p=1).min(1).values.mean() for p,t in zip(preds, targs)]).mean()

def detection(bs, n=38):
    "Return a detector whose batches are lists of pictures of several sizes, each with 1 to 9 boxes"
    def item(i, gen): return torch.randn(3, 8, 8+i%3, generator=gen),dict(boxes=torch.rand(1+i%9, 4, generator=gen))
    return learner_of_items(bs, Detector(), box_loss, lambda items: tuple(map(list, zip(*items))), item, n)

class Tagger(Module):
    "Tags tokens: takes a mapping, and returns logits, or if it has labels, a dict of loss and logits"
    def __init__(self): self.emb,self.rnn,self.head = nn.Embedding(20, 8),nn.GRU(8, 8, batch_first=True),nn.Linear(8, 3)
    def forward(self, batch):
        logits = self.head(self.rnn(self.emb(batch['input_ids'])*batch['attention_mask'][...,None])[0])
        if 'labels' not in batch: return logits
        return dict(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), batch['labels'].flatten()))

def tagged(bs, with_labels=False, n=38):
    "Return a tagger on samples with 2 to 7 real tokens; the labels of the other tokens are -100"
    def item(i, gen):
        real = torch.arange(7)<2+i%6
        labels = torch.randint(0, 3, (7,), generator=gen).masked_fill(~real, -100)
        x = dict(input_ids=torch.randint(0, 20, (7,), generator=gen), attention_mask=real.long())
        return (dict(x, labels=labels) if with_labels else x),labels
    def create_batch(items):
        xs,ys = zip(*items)
        return MappingBatch({k:torch.stack([x[k] for x in xs]) for k in xs[0]}),torch.stack(ys)
    loss_func = (lambda out,y: out['loss']) if with_labels else CrossEntropy()
    return learner_of_items(bs, Tagger(), loss_func, create_batch, item, n)

def n_tokens(learn): return (learn.yb[0]!=-100).sum()

apps = dict(
    vision=dict(make=partial(vision, ps=0., loss_func=CrossEntropy()), fit=fine_tune),
    unet=dict(make=segmenter_in_double, fit=fine_tune), text=dict(make=sentiment, fit=fine_tune),
    language=dict(make=language, micro_batch_size=4), table=dict(make=table, full=8, fit=two_fits),
    table_with_a_short_end=dict(make=partial(table, n=39, drop_last=False)), collab=dict(make=ratings),
    detection=dict(make=detection), hugging=dict(make=tagged),
    hugging_split=dict(make=tagged, micro=12, micro_batch_size=4),
    hugging_loss=dict(make=partial(tagged, with_labels=True), n_items=n_tokens))

@pytest.mark.parametrize('nm', apps)
def test_an_application_trains_as_on_full_batches(nm): assert_same_run(*both(**apps[nm]))

# GANs

critic = partial(basic_critic, 16, 3, n_features=8, norm_type=NormType.Instance)

def wgan(bs, switcher=noop, n=32, **kwargs):
    dls = loaders(bs, TransformBlock, ImageBlock, get_x=partial(generate_noise, size=6), get_y=pixels.__getitem__)
    dls.train.n,dls.train.drop_last = n,False
    generator = basic_generator(16, 3, in_sz=6, n_features=8, norm_type=NormType.Instance)
    return GANLearner.wgan(dls, generator, critic(), switcher=switcher(), opt_func=partial(Adam, mom=0.), **kwargs)

def limit_memory(l):
    "Run out of memory with more than 3 samples, but only in the run that accumulates"
    if hasattr(l, 'gradient_accumulation'): raise_oom_above(3)(len(l.pred))

few_critic_steps = partial(wgan, switcher=lambda: FixedGANSwitcher(2, 1))
adaptive = partial(wgan, switcher=lambda: AdaptiveGANSwitcher(gen_thresh=-1e-3, critic_thresh=-9.5e-4))
gans = dict(wgan=dict(make=wgan), few=dict(make=partial(few_critic_steps, n=30), fit=two_fits),
    adaptive=dict(make=adaptive, fit=two_fits),
    rates=dict(make=lambda bs: few_critic_steps(bs, cbs=GANDiscriminativeLR(3.)),
        fit=lambda learn,cbs: learn.fit(2, 1e-3, cbs=cbs)),
    split=dict(make=lambda bs: few_critic_steps(8), cbs=lambda: [RecordAt('after_pred', limit_memory)],
        micro_batch_size='auto'))
gans = {nm:dict(micro=2, full=8)|o for nm,o in gans.items()}   # an epoch has 4 steps

@pytest.mark.parametrize('nm', gans)
def test_each_step_of_a_gan_trains_the_critic_or_the_generator(nm):
    "The table of the fit shows the losses of both, as means over steps"
    def make(bs):
        learn = gans[nm]['make'](bs)
        learn.recorder.train_metrics = True
        return learn
    a,b = both(**gans[nm]|dict(make=make))
    assert_same_run(a, b)
    for o in ('gen_losses','crit_losses'):
        x,y = (getattr(l.gan_trainer, o) for l in (a,b))
        assert len(x)==len(y)>0 and deviation(x, y)<2e-6, o
    assert b.recorder.metric_names[2:4]==['train_gen_loss','train_crit_loss']

def test_logging_each_micro_batch_of_a_gan_does_not_change_the_run():
    a,b = both(**gans['adaptive'], log_accum_batch=False)
    assert deviation(a.model.state_dict(), b.model.state_dict())<1e-7
    assert len(b.gan_trainer.crit_losses)==4*len(a.gan_trainer.crit_losses)
