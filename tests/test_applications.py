"""Learners as fastai users build them, each against its twin: the same Learner on big batches.

All in double precision, which shows to 1e-7 whether it is the same run, except where a test says otherwise. What
the law leaves out is taken out of the models: BatchNorm becomes GroupNorm (or its statistics are frozen), dropout
is 0. Loaders make their items in this process, in an order that does not depend on the batch size: then
augmentation by item is the same, too, and so is a GAN's noise.
"""
import numpy as np, pandas as pd, pytest, torch
from collections import UserDict
from functools import partial
from pydoc_data.topics import topics
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
from fastai.metrics import Perplexity, accuracy
from fastai.optimizer import Adam, SGD
from fastai.tabular.data import TabularDataLoaders
from fastai.tabular.core import Categorify, FillMissing, Normalize
from fastai.tabular.learner import tabular_learner
from fastai.tabular.model import tabular_config
from fastai.text.core import BaseTokenizer
from fastai.text.data import TextBlock
from fastai.text.learner import language_model_learner, text_classifier_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config
from fastai.torch_core import apply, set_seed
from fastai.vision.augment import RandomResizedCrop
from fastai.vision.data import ImageBlock, ImageDataLoaders, MaskBlock
from fastai.vision.gan import (AdaptiveGANSwitcher, AdaptiveLoss, FixedGANSwitcher, GANDiscriminativeLR, GANLearner,
    basic_critic,
    basic_generator, generate_noise)
from fastai.vision.learner import unet_learner, vision_learner
from fastcore.basics import noop
from PIL import Image
from fastaccum import GradientAccumulation
from fastaccum.gan import SwitchListener
from fastaccum.core.listeners import listeners
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, deviation, deviations
from common import Raise, grads, weights

cpu = torch.device('cpu')

class Double(Callback):
    "Cast the batch to double precision"
    order = -50
    def before_batch(self):
        def cast(o):
            if isinstance(o, torch.Tensor) and o.is_floating_point(): return o.double()
            return o.long() if getattr(o, 'dtype', None)==torch.int8 else o
        self.learn.xb,self.learn.yb = apply(cast, tuple(self.xb)),apply(cast, tuple(self.yb))

def without_batchnorm(m):
    "`m` with GroupNorm, which knows only the sample, in place of BatchNorm"
    for nm,o in m.named_children():
        if isinstance(o, nn.modules.batchnorm._BatchNorm): setattr(m, nm, nn.GroupNorm(1, o.num_features))
        else: without_batchnorm(o)
    return m

def in_double(learn):
    learn.model = without_batchnorm(learn.model).double()
    return learn.add_cbs([Double(),Float32Loss()])

def quiet(learn):
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def both(make, fit, micro=8, macro=32, acc=None, cbs=list, seed=0):
    """Two Learners from `make`, given a batch size, and fitted: one on batches of `macro`, one on micro-batches.
    Without `acc`, arguments by name, the callback is `GradientAccumulation()`, which accumulates 32 samples"""
    def run(bs, own):
        set_seed(seed)
        learn = quiet(make(bs))
        before = weights(learn)
        set_seed(seed+1)
        fit(learn, own()+cbs())
        assert not weights(learn).allclose(before, atol=1e-4)
        return learn
    return run(macro, list),run(micro, lambda: [GradientAccumulation() if acc is None
        else GradientAccumulation(macro, **acc)])

def one_cycle(learn, cbs): learn.fit_one_cycle(2, 1e-3, cbs=cbs)
def fine_tune(learn, cbs): learn.fine_tune(1, 1e-3, cbs=cbs)
def two_fits(learn, cbs):
    learn.fit(1, 1e-3, cbs=cbs)
    learn.fit_flat_cos(1, 1e-3, cbs=cbs)

# Vision

@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    "80 small pictures, of which the names tell class and set"
    d = tmp_path_factory.mktemp('pictures')
    rng = np.random.default_rng(0)
    for i in range(80):
        split = 'train' if i<64 else 'valid'
        (d/split/'abc'[i%3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20,20,3), dtype='uint8')).save(d/split/'abc'[i%3]/f'{i:02}.png')
    return d

def classifier(bs, pictures, loss_func=None, **kwargs):
    dls = ImageDataLoaders.from_folder(pictures, item_tfms=RandomResizedCrop(16, min_scale=0.5), bs=bs,
        num_workers=0, device=cpu)
    return vision_learner(dls, resnet18, pretrained=False, ps=0., loss_func=loss_func, metrics=accuracy, **kwargs)

@pytest.mark.parametrize('fit', [fine_tune,two_fits])
def test_vision_learner(fit, pictures):
    a,b = both(lambda bs: in_double(classifier(bs, pictures, CrossEntropy())), fit)
    assert_twins(a, b)
    assert len(b.recorder.losses)==2

def test_vision_learner_with_frozen_statistics(pictures):
    "The body's BatchNorm is frozen, with `BnFreeze`, and the head has none"
    def head(): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 3))
    def make(bs):
        learn = classifier(bs, pictures, CrossEntropy(), custom_head=head(), train_bn=False)
        learn.model.double()
        learn.freeze()
        return learn.add_cbs([Double(),Float32Loss()])
    def fit(learn, cbs): learn.fit_one_cycle(2, 1e-2, cbs=cbs+[BnFreeze()])
    assert_twins(*both(make, fit))

def test_vision_learner_in_single_precision(pictures):
    """With fastai's own loss, in single precision: 1e-7 apart. With SGD, since Adam makes a step of full length of
    the rounding of a tiny gradient"""
    def make(bs):
        learn = classifier(bs, pictures, opt_func=SGD)
        learn.model = without_batchnorm(learn.model)
        return learn
    assert_twins(*both(make, one_cycle), tol=2e-6)

def segmenter(bs):
    rng = np.random.default_rng(0)
    images,masks = rng.integers(0, 255, (40,16,16,3), dtype='uint8'),rng.integers(0, 3, (40,16,16), dtype='uint8')
    masks[:,:4] = np.where(rng.random((40,4,16))<0.5, 255, masks[:,:4])   # pixels without a label
    block = DataBlock((ImageBlock,MaskBlock(codes=['a','b','c'])), get_x=images.__getitem__, get_y=masks.__getitem__,
        splitter=lambda _: (range(32),range(32,40)))
    # fastai weighs validation batches by pictures
    dls = block.dataloaders(range(40), bs=bs, val_bs=8, num_workers=0, device=cpu)
    learn = unet_learner(dls, resnet18, pretrained=False, n_out=3, cut=6,
        loss_func=nn.CrossEntropyLoss(ignore_index=255),
        splitter=lambda m: [list(m[0].parameters()),list(m[1:].parameters())])
    learn.model.layers = learn.model.layers[:-1]   # `ToTensorBase`, which makes single precision of double
    return learn

def test_unet_learner():
    "Some pixels have no label, more in some pictures than in others: the mean is over those that have one"
    assert_twins(*both(lambda bs: in_double(segmenter(bs)), fine_tune, micro=4, macro=16, acc={}))

# Text

words = ' '.join(topics[k] for k in ('assert','if','while','try','with','pass')).split()

def texts(bs, is_lm, dl_type=None, n=64, size=12, **kwargs):
    "Pieces of Python's own manual, all of `size` words"
    rows = [dict(text=' '.join(words[i*size:(i+1)*size]), label='ab'[i%2], valid=i>=n) for i in range(n+8)]
    block = DataBlock((TextBlock.from_df('text', is_lm=is_lm, seq_len=kwargs.get('seq_len', 72), min_freq=1,
        tok=BaseTokenizer(), rules=[], n_workers=0),
        *(() if is_lm else (CategoryBlock,))), get_x=lambda r: r.text, get_y=None if is_lm else lambda r: r.label,
        splitter=lambda df: ([i for i,v in enumerate(df.valid) if not v],[i for i,v in enumerate(df.valid) if v]))
    return block.dataloaders(pd.DataFrame(rows), bs=bs, num_workers=0, device=cpu, dl_type=dl_type, **kwargs)

def tiny(config):
    """No dropout, of the weights next to none: with none at all, fastai 2.8.12 fails on a CPU (`F.dropout` returns
    the parameter itself)"""
    return config|dict(emb_sz=8, n_hid=10, n_layers=2, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-30)

def sentiment(bs, loss_func):
    return text_classifier_learner(texts(bs, False, TfmdDL), AWD_LSTM, config=tiny(awd_lstm_clas_config),
        pretrained=False, drop_mult=1., ps=[0.],
        loss_func=loss_func, metrics=accuracy)

@pytest.mark.parametrize('fit', [fine_tune,one_cycle])
def test_text_classifier_learner(fit):
    """All texts are of one length and come in the order of a plain loader: fastai's `SortedDL` shuffles whole
    batches, so that with another batch size it makes other batches, and pads a text to the longest in its batch"""
    assert_twins(*both(lambda bs: in_double(sentiment(bs, CrossEntropy())), fit))

class Windows(nn.Module):
    "A language model that reads `k` windows one after the other, and remembers, as it does from batch to batch"
    def __init__(self, model, size): super().__init__(); self.model,self.size = model,size
    def __getitem__(self, i): return self.model[i]
    def reset(self): self.model.reset()
    def forward(self, x):
        pred,*acts = zip(*(self.model(o) for o in x.split(self.size, dim=1)))
        return torch.cat(pred, 1),*(torch.cat(o, 1) for o in acts)

@pytest.mark.parametrize('fit', [one_cycle,two_fits])
def test_language_model_learner(fit):
    """`LMDataLoader` cuts the corpus into as many streams as a batch has rows. Micro-batches are windows of the
    same streams, one after the other, so the twin is not a loader with more rows: it is one with windows four times
    as long, of which the model reads a quarter at a time. The penalty `beta` on differences between neighbouring
    activations is off: at the seam of two windows there are none"""
    def make(bs):
        k = bs//4
        dls = texts(4, True, seq_len=6*k)
        # the same in both: fastai weighs validation batches by rows, short windows like long ones
        dls.loaders[1] = texts(4, True, seq_len=6).valid
        learn = in_double(language_model_learner(dls, AWD_LSTM, config=tiny(awd_lstm_lm_config), pretrained=False,
            alpha=2., beta=0., metrics=Perplexity()))
        learn.loss_func = CrossEntropy()
        if k>1: learn.model = Windows(learn.model, 6)
        return learn
    # the last step has fewer windows, the last window fewer words
    a,b = both(make, fit, micro=4, macro=16, acc=dict(drop_last=False))
    assert_twins(a, b)
    assert len(b.recorder.losses)>=7

# Tables

def wine(bs, drop_last, n=128, loss_func=CrossEntropy()):
    from sklearn.datasets import load_wine
    o = load_wine(as_frame=True)
    df = o.data.assign(strong=np.where(o.data.alcohol>13, 'yes', 'no'), y=o.target).sample(frac=1.,
        random_state=0).reset_index(drop=True)
    df.loc[::7,'hue'] = np.nan
    dls = TabularDataLoaders.from_df(df[:n+40], procs=[Categorify,FillMissing,Normalize], cat_names=['strong'],
        cont_names=list(o.data.columns), y_names='y',
        y_block=CategoryBlock(), valid_idx=list(range(n, n+40)), bs=bs, drop_last=drop_last, num_workers=0, device=cpu)
    return tabular_learner(dls, layers=[20,10], config=tabular_config(use_bn=False, bn_cont=False),
        loss_func=loss_func, metrics=accuracy)

@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('n,drop_last', [(128,True), (117,False)])
def test_tabular_learner(n, drop_last, seed):
    "Of 117 rows, the last macro-batch has 21, the last micro-batch 5"
    assert_twins(*both(lambda bs: in_double(wine(bs, drop_last, n)), one_cycle, seed=seed))

def test_tabular_learner_that_drops_the_last_batch():
    """The loaders drop 21 and 5 rows, as fastai's training loaders do unless told otherwise; what is left of the
    micro-batches is dropped too"""
    a,b = both(lambda bs: in_double(wine(bs, True, 117)), one_cycle, acc=dict(drop_last=True))
    assert_twins(a, b)
    assert len(b.recorder.losses)==2*3

def rating_loss(p, y): return F.mse_loss(p.flatten(), y.flatten())   # fastai's is in single precision

def ratings(bs, use_nn, loss_func=rating_loss):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=rng.integers(0, 9, 160), item=rng.integers(0, 12, 160),
        rating=rng.integers(1, 11, 160)/2))
    dls = CollabDataLoaders.from_df(df, valid_pct=0.2, seed=0, bs=bs, num_workers=0, device=cpu)
    config = dict(config=tabular_config(use_bn=False), layers=[8]) if use_nn else {}
    return collab_learner(dls, n_factors=5, use_nn=use_nn, y_range=(0,5.5), loss_func=loss_func, **config)

@pytest.mark.parametrize('use_nn', [False,True])
def test_collab_learner(use_nn):
    def fit(learn, cbs): learn.fit_one_cycle(2, 5e-3, wd=0.1, cbs=cbs)
    assert_twins(*both(lambda bs: in_double(ratings(bs, use_nn)), fit))

def own_losses(bs, kind):
    if kind=='tabular': learn = wine(bs, True, loss_func=None)
    elif kind=='collab': learn = ratings(bs, False, loss_func=None)
    else: learn = sentiment(bs, loss_func=None)
    learn.opt_func,learn.model = SGD,without_batchnorm(learn.model)
    return learn

@pytest.mark.parametrize('kind', ['tabular','collab','text'])
def test_fastais_own_losses(kind):
    "In single precision, as users have it: up to 3e-8 apart"
    def fit(learn, cbs): learn.fit_one_cycle(2, 1e-2, cbs=cbs)
    assert_twins(*both(partial(own_losses, kind=kind), fit), tol=3e-7)

# Detection

def collate(items): return torch.stack([x for x,_ in items]),[y for _,y in items]
def as_lists(items): return [x for x,_ in items],[y for _,y in items]

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

def detection(bs, collate, n=64):
    gen = torch.Generator().manual_seed(0)
    def item(i):
        x = torch.randn(3, 8, 8+i%3*(collate is as_lists), generator=gen)
        return x,dict(boxes=torch.rand(1+i%9, 4, generator=gen), labels=torch.ones(1+i%9).long())
    ds = [item(i) for i in range(n+8)]
    dls = DataLoaders(DataLoader(ds[:n], bs=bs, shuffle=True, create_batch=collate),
        DataLoader(ds[n:], bs=8, create_batch=collate), device=cpu)
    return in_double(Learner(dls, Detector(), loss_func=box_loss))

@pytest.mark.parametrize('n', [64,70])
@pytest.mark.parametrize('seed', range(2))
def test_detection_with_list_targets(n, seed):
    "A picture has 1 to 9 boxes, which are no samples"
    assert_twins(*both(lambda bs: detection(bs, collate, n), one_cycle, seed=seed))

def test_detection_with_a_list_of_pictures():
    """As torchvision's detectors want them: pictures of any size, and so no tensor that has the samples along its
    first dimension"""
    assert_twins(*both(lambda bs: detection(bs, as_lists), one_cycle))

# Hugging Face

class Encoding(UserDict):
    "A mapping which is no `dict`, like transformers' BatchEncoding"
    def __getattr__(self, k):
        if k=='data' or k not in self.data: raise AttributeError(k)
        return self.data[k]

class Tagger(nn.Module):
    """Takes what the tokenizer returns by name, and returns a mapping, like transformers' models; with labels also
    their loss"""
    def __init__(self, with_labels):
        super().__init__()
        self.with_labels,self.emb,self.head = with_labels,nn.Embedding(20, 8),nn.Linear(8, 3)
        self.rnn = nn.GRU(8, 8, batch_first=True)
    def forward(self, batch): return self.named(**batch)
    def named(self, input_ids, attention_mask, labels=None, **kwargs):
        res = dict(logits=self.head(self.rnn(self.emb(input_ids)*attention_mask[...,None])[0]))
        if labels is not None: res['loss'] = F.cross_entropy(res['logits'].flatten(0, 1), labels.flatten())
        return res if self.with_labels else res['logits']

def tagged(bs, kind, n=64, with_labels=False):
    gen = torch.Generator().manual_seed(0)
    def item(i):
        size = torch.arange(7)<2+i%6
        labels = torch.randint(0, 3, (7,), generator=gen).masked_fill(~size, -100)
        x = dict(input_ids=torch.randint(0, 20, (7,), generator=gen), attention_mask=size.long(),
            token_type_ids=torch.zeros(7).long())
        return (dict(x, labels=labels) if with_labels else x),labels
    ds = [item(i) for i in range(n+8)]
    def create_batch(items):
        return kind({k:torch.stack([x[k] for x,_ in items]) for k in items[0][0]}),torch.stack([y for _,y in items])
    dls = DataLoaders(*(DataLoader(o, bs=bs, shuffle=s, create_batch=None if kind is None else create_batch)
        for o,s in ((ds[:n],True),(ds[n:],False))), device=cpu)
    loss_func = (lambda out,y: out['loss']) if with_labels else CrossEntropy()
    return in_double(Learner(dls, Tagger(with_labels), loss_func=loss_func))

@pytest.mark.parametrize('kind', [None,dict,Encoding], ids=['collated','dict','Encoding'])
@pytest.mark.parametrize('n', [64,70])
def test_dict_batches(kind, n):
    """`(dict, labels)` with 2 to 7 real tokens in a sample, the others -100, as the loader collates them and as
    BatchEncoding-like mappings"""
    assert_twins(*both(lambda bs: tagged(bs, kind, n), one_cycle))

def test_loss_of_the_model():
    "The model takes the labels and returns its loss, a mean over tokens. Nobody but the user knows that: `size=`"
    def make(bs): return tagged(bs, Encoding, with_labels=True)
    assert_twins(*both(make, one_cycle, acc=dict(size=lambda learn: (learn.yb[0]!=-100).sum())))
    res = deviations(*both(make, one_cycle))
    assert res['weights']>1e-5, 'it is found out now: say so on the page about sizes'

# GANs

pixels = np.random.default_rng(0).integers(0, 255, (72,16,16,3), dtype='uint8')
def train_valid(_): return list(range(64)),list(range(64, 72))
critic_16 = partial(basic_critic, 16, 3, n_features=8, norm_type=NormType.Instance)

def wgan(bs, switcher=None, noise=partial(generate_noise, size=6), **kwargs):
    block = DataBlock((TransformBlock,ImageBlock), get_x=noise, get_y=pixels.__getitem__, splitter=train_valid)
    generator = basic_generator(16, 3, in_sz=6, n_features=8, norm_type=NormType.Instance)
    return in_double(GANLearner.wgan(block.dataloaders(range(72), bs=bs, val_bs=8, num_workers=0, device=cpu),
        generator, critic_16(), switcher=switcher and switcher(),
        opt_func=partial(Adam, mom=0.), **kwargs))

def from_learners(bs, switcher=None, **kwargs):
    "A generator of pictures from pictures, and a critic, that were Learners before"
    block = DataBlock((ImageBlock,ImageBlock), get_x=lambda i: pixels[i]//2,
        get_y=pixels.__getitem__, splitter=train_valid)
    dls = block.dataloaders(range(72), bs=bs, val_bs=8, num_workers=0, device=cpu)
    generator = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1))
    crit_loss = AdaptiveLoss(lambda p,t: F.binary_cross_entropy_with_logits(p, t.double()))
    return in_double(GANLearner.from_learners(Learner(dls, generator, loss_func=nn.MSELoss()),
        Learner(dls, critic_16(), loss_func=crit_loss),
        switcher=switcher and switcher(), weights_gen=(1.,50.), opt_func=partial(Adam, mom=0.), **kwargs))

def gan_fit(learn, cbs): learn.fit(2, 1e-3, cbs=cbs)
def two_gan_fits(learn, cbs):
    gan_fit(learn, cbs)
    one_cycle(learn, cbs)

def same_gan(a, b):
    "The same run, in which both critic and generator have trained"
    assert_twins(a, b)
    for nm in ('gen_losses','crit_losses'):
        x,y = (getattr(o.gan_trainer, nm) for o in (a,b))
        assert len(x)==len(y)>0 and deviation(x, y)<2e-6, nm
    assert not any('after_batch' in vars(o) or 'before_batch' in vars(o) for o in b.cbs)

gans = dict(wgan=wgan, few=partial(wgan, switcher=lambda: FixedGANSwitcher(2, 1)),
    calls=partial(wgan, switcher=lambda: FixedGANSwitcher(lambda n: 1+n, 1)),
    from_learners=from_learners, gen_first=partial(from_learners, gen_first=True),
    adaptive=partial(from_learners, switcher=lambda: AdaptiveGANSwitcher(critic_thresh=0.65)),
    thresholds=partial(from_learners, switcher=lambda: AdaptiveGANSwitcher(gen_thresh=5.5, critic_thresh=0.65)))

@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('fit', [one_cycle,two_gan_fits])
@pytest.mark.parametrize('nm', gans)
def test_gan(nm, fit, seed):
    def make(bs):
        learn = gans[nm](bs)
        learn.recorder.train_metrics = True
        return learn
    a,b = both(make, fit, micro=4, macro=16, acc={}, seed=seed)
    same_gan(a, b)
    assert b.recorder.metric_names[2:4]==['train_gen_loss','train_crit_loss']

@pytest.mark.parametrize('nm', ['wgan','adaptive'])
def test_gan_that_logs_micro_batches(nm):
    "What is logged decides nothing: weights and turns are the same"
    a,b = both(gans[nm], gan_fit, micro=4, macro=16, acc=dict(log_accum_batch=False))
    assert deviation(a.model.state_dict(), b.model.state_dict())<1e-7
    assert len(b.gan_trainer.crit_losses)==4*len(a.gan_trainer.crit_losses)

@pytest.mark.parametrize('place', ['learner','fit'])
def test_gan_with_discriminative_rates(place):
    "Before the switcher and after it in the list of callbacks, which makes a difference in fastai"
    def cbs(where): return [GANDiscriminativeLR(3.)] if where==place else []
    def make(bs): return gans['few'](bs, cbs=cbs('learner'))
    same_gan(*both(make, gan_fit, micro=4, macro=16, acc={}, cbs=lambda: cbs('fit')))

class Penalty(Callback):
    "A penalty on the critic, which is in the loss and in its gradient, but not in what the table shows as `crit_loss`"
    run_valid = False
    def after_loss(self):
        if self.gan_trainer.gen_mode: return
        penalty = 0.1*self.pred.square().mean()
        self.learn.loss_grad,self.learn.loss = self.loss_grad+penalty,self.loss+penalty.detach().float()

def test_gan_with_a_penalty(): same_gan(*both(gans['few'], gan_fit, micro=4, macro=16, acc={}, cbs=lambda: [Penalty()]))

def test_gan_after_lr_find(tmp_path):
    def fit(learn, cbs):
        learn.path = tmp_path
        with learn.added_cbs(cbs): learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
        gan_fit(learn, cbs)
    same_gan(*both(gans['few'], fit, micro=4, macro=16, acc={}))

class Short(Callback):
    "Memory that holds no more than 5 samples of a training batch"
    run_valid = False
    def after_pred(self):
        if len(self.pred)>5: raise torch.OutOfMemoryError('planted')

@pytest.mark.parametrize('rates', [False,True])
def test_gan_that_is_split(rates):
    "The attempts that fail leave no learning rate multiplied"
    def cbs(): return [GANDiscriminativeLR(3.)]*rates
    def fit(learn, own): gan_fit(learn, own+[Short()]*bool(own))
    a,b = both(lambda bs: gans['few'](16, cbs=cbs()), fit, micro=4, macro=16, acc=dict(micro_batch_size='auto'))
    same_gan(a, b)

def test_gan_with_a_ragged_end():
    "The loader yields 60 of 64 samples: the last of 4 steps is on 12 samples"
    def make(bs):
        learn = gans['few'](bs)
        learn.dls.train.n,learn.dls.train.drop_last = 60,False
        return learn
    a,b = both(make, gan_fit, micro=4, macro=16, acc=dict(drop_last=False))
    same_gan(a, b)
    assert len(b.recorder.losses)==8

def test_gan_whose_loader_ends_early():
    """It announces 64 samples and yields 56: the step on the last 8 is taken after the loop, and counts for critic
    or generator"""
    def make(bs):
        learn = gans['few'](bs)
        learn.dls.train.get_idxs,learn.dls.train.drop_last = lambda: list(range(56)),False
        return learn
    a,b = both(make, gan_fit, micro=4, macro=16, acc=dict(drop_last=False))
    res = deviations(a, b)
    assert res['weights']<1e-7 and res['losses']<2e-6, res
    for nm in ('gen_losses','crit_losses'): assert deviation(*(getattr(o.gan_trainer, nm) for o in (a,b)))<2e-6

@pytest.mark.parametrize('at', [1,5])
@pytest.mark.parametrize('event', ['before_batch','after_backward','after_step','after_batch'])
def test_gan_after_an_interrupt(event, at):
    "A plain fit afterwards is a plain fit: the switcher counts batches again"
    fresh,learn = (quiet(wgan(4, lambda: FixedGANSwitcher(2, 1))) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, 1e-3, cbs=[GradientAccumulation(8),Raise(event, KeyboardInterrupt, order=-20, at=at)])
    assert not any(g is not None and g.any() for g in grads(learn))
    learn.opt.clear_state()   # no `reset_opt`, which would leave out those that are not trained at the moment
    # those of fastai's `zero_grad` are zeros, with which its optimizers still move momentum; a fresh Learner has none
    learn.model.zero_grad()
    fresh.model.load_state_dict(learn.model.state_dict())
    for o in (fresh,learn):
        set_seed(2)
        o.dls.train.rng = Random(2)
        o.fit(1, 1e-3)
    same_gan(fresh, learn)
    assert len(learn.gan_trainer.crit_losses)==11 and len(learn.gan_trainer.gen_losses)==5

class EachBatch(Callback):
    "A switcher of one's own"
    run_valid = False
    def after_batch(self): self.gan_trainer.switch()

@pytest.mark.parametrize('macro', [8,12,16])
def test_a_switcher_of_ones_own(macro, monkeypatch):
    """It is refused before the first step, whether or not the closing micro-batch is of the part that began; as a
    listener it is right"""
    set_seed(0)
    learn = quiet(wgan(4, EachBatch, clip=None))
    before = weights(learn)
    with pytest.raises(RuntimeError, match='SwitchListener'): learn.fit(1, 1e-3, cbs=GradientAccumulation(macro))
    assert weights(learn).equal(before)
    monkeypatch.setitem(listeners, EachBatch, SwitchListener)
    same_gan(*both(partial(wgan, switcher=EachBatch), gan_fit, micro=4, macro=16, acc={}))
