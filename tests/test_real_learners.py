"""Learners as fastai users build them: does the fit warn, what does `twin_check` say, and is that true?

Each is trained for a few steps on big batches, and on micro-batches. How far apart they arrive, relative to the way
they have travelled, must agree with what the check said of one of their batches.
"""
import warnings
import numpy as np, pandas as pd, pytest, torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18
from fastai.callback.mixup import MixUp
from fastai.callback.training import BnFreeze
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import DiceLoss, FocalLossFlat
from fastai.optimizer import SGD
from fastai.tabular.learner import tabular_learner
from fastai.text.core import BaseTokenizer
from fastai.text.data import TextBlock
from fastai.text.learner import language_model_learner, text_classifier_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config
from fastai.torch_core import set_seed
from fastai.vision.data import ImageBlock, MaskBlock
from fastai.vision.learner import unet_learner, vision_learner
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.core.notices import BatchNormWarning, LoaderWarning, LossWarning, StateWarning, TwinWarning
from test_applications import (Encoding, as_lists, classifier, collate, cpu, detection, gans, pictures, quiet, ratings,
    tagged, texts, wine, without_batchnorm, words)

def grouped(learn):
    learn.model = without_batchnorm(learn.model)
    return learn

def frozen(learn):
    learn.freeze()
    return learn

def body_only(**kwargs):
    "With a head that has neither BatchNorm nor dropout"
    return dict(custom_head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 3)), **kwargs)

class MixedLoss:
    "As in fastai's documentation: a mean, and a sum"
    def __init__(self): self.focal,self.dice = FocalLossFlat(axis=1),DiceLoss(axis=1, smooth=1.)
    def __call__(self, pred, targ): return self.focal(pred, targ)+self.dice(pred, targ)

def segmenter(bs, loss_func=None):
    rng = np.random.default_rng(0)
    images,masks = rng.integers(0, 255, (36,16,16,3), dtype='uint8'),rng.integers(0, 3, (36,16,16), dtype='uint8')
    block = DataBlock((ImageBlock,MaskBlock(codes=['a','b','c'])), get_x=images.__getitem__, get_y=masks.__getitem__,
        splitter=lambda _: (range(32),range(32,36)))
    dls = block.dataloaders(range(36), bs=bs, num_workers=0, device=cpu)
    return unet_learner(dls, resnet18, pretrained=False, n_out=3, cut=6, loss_func=loss_func,
        splitter=lambda m: [list(m[0].parameters()),list(m[1:].parameters())])

tiny = dict(emb_sz=8, n_hid=10, n_layers=2)
def sentiment(bs): return text_classifier_learner(texts(bs, False), AWD_LSTM, config=awd_lstm_clas_config|tiny,
    pretrained=False)
def language(bs): return language_model_learner(texts(bs, True, seq_len=6), AWD_LSTM, config=awd_lstm_lm_config|tiny,
    pretrained=False)
def wine_with_batchnorm(bs): return tabular_learner(wine(bs, True).dls, layers=[20,10])

def info_nce(p, y):
    "Two views of each sample, told from the views of all others"
    a,b = F.normalize(p, dim=1).chunk(2, 1)
    return F.cross_entropy(a@b.T/0.1, torch.arange(len(a)))
def pairs(bs):
    gen = torch.Generator().manual_seed(0)
    ds = [(torch.randn(6, generator=gen),0) for _ in range(64)]
    dls = DataLoaders(*(DataLoader(ds, bs=bs) for _ in range(2)))
    return Learner(dls, nn.Linear(6, 8), loss_func=info_nce)

def tokens(learn): return (learn.yb[0]!=-100).sum()

bn,batchnorm = {BatchNormWarning},['predictions','gradients','buffers']
# What makes it, given `bs`; the categories of the fit's warnings; the rows that are off
real = dict(
    vision=(lambda bs, d: classifier(bs, d), bn, batchnorm),
    vision_default=(lambda bs, d: vision_learner(classifier(bs, d).dls, resnet18, pretrained=False),
        bn, ['predictions','draws','gradients','buffers']),
    vision_frozen_head=(lambda bs, d: frozen(classifier(bs, d, train_bn=False, cbs=BnFreeze())), bn, batchnorm),
    vision_frozen=(lambda bs, d: frozen(classifier(bs, d, train_bn=False, cbs=BnFreeze(), **body_only())), set(), []),
    vision_groupnorm=(lambda bs, d: grouped(classifier(bs, d)), set(), []),
    vision_mixup=(lambda bs, d: grouped(classifier(bs, d, cbs=MixUp())), None, ['callbacks','gradients']),
    unet=(lambda bs, d: segmenter(bs), bn, batchnorm),
    unet_groupnorm=(lambda bs, d: grouped(segmenter(bs)), set(), []),
    unet_dice=(lambda bs, d: grouped(segmenter(bs, DiceLoss())), set(), []),
    unet_dice_mean=(lambda bs, d: grouped(segmenter(bs, DiceLoss(reduction='mean'))), set(), []),
    unet_mixed_loss=(lambda bs, d: grouped(segmenter(bs, MixedLoss())), {LossWarning}, ['loss','gradients']),
    sentiment=(lambda bs, d: sentiment(bs), {BatchNormWarning,LoaderWarning},
        ['predictions','draws','loader','gradients','buffers']),
    language=(lambda bs, d: language(bs), {LoaderWarning,StateWarning}, ['predictions','draws','loader','gradients']),
    tabular=(lambda bs, d: wine(bs, True, loss_func=None), set(), []),
    tabular_batchnorm=(lambda bs, d: wine_with_batchnorm(bs), bn, batchnorm),
    collab=(lambda bs, d: ratings(bs, False, loss_func=None), set(), []),
    collab_nn=(lambda bs, d: ratings(bs, True, loss_func=None), set(), []),
    gan=(lambda bs, d: gans['few'](bs), set(), []),
    gan_adaptive=(lambda bs, d: gans['adaptive'](bs), set(), []),
    detection=(lambda bs, d: detection(bs, collate), set(), []),
    detection_lists=(lambda bs, d: detection(bs, as_lists), set(), []),
    hugging=(lambda bs, d: tagged(bs, Encoding), set(), []),
    hugging_loss=(lambda bs, d: tagged(bs, Encoding, with_labels=True), set(), ['loss','gradients']),
    hugging_size=(lambda bs, d: tagged(bs, Encoding, with_labels=True), set(), []),
    contrastive=(lambda bs, d: pairs(bs), {LossWarning}, ['loss','gradients']))

def made(nm, bs, pictures):
    set_seed(0)
    learn = quiet(real[nm][0](bs, pictures))
    if not nm.startswith('gan'): learn.opt_func = SGD   # Adam makes full steps of gradients that are rounding
    return learn

def trained(nm, bs, cbs, pictures):
    "Weights before and after, and the categories of the warnings"
    learn = made(nm, bs, pictures)
    def weights(): return torch.cat([p.detach().double().flatten() for p in learn.model.parameters()])
    start = weights()
    set_seed(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        learn.fit(1, 1e-3 if nm.startswith('gan') else 1e-2, cbs=cbs)
    return start,weights(),{o.category for o in seen if issubclass(o.category, TwinWarning)}

@pytest.mark.parametrize('nm', real)
def test_what_is_said_is_true(nm, pictures):
    _,said,rows = real[nm]
    macro,micro = (16,4) if nm.startswith(('gan','unet')) else (32,8)
    size = tokens if nm=='hugging_size' else None
    start,a,none = trained(nm, macro, [], pictures)
    _,b,heard = trained(nm, micro, [GradientAccumulation(macro, size=size)], pictures)
    apart = ((a-b).norm()/(a-start).norm()).item()
    res = made(nm, 2*micro, pictures).twin_check(cbs=GradientAccumulation(macro, size=size))
    assert [o.what for o in res.rows if not o.ok]==rows, res
    assert res.ok==(not rows)==(apart<1e-4), (apart, res)
    assert not none and (said is None or heard==said), heard

@pytest.mark.parametrize('cbs', [lambda: GradientAccumulation(8, micro_batch_size=4),lambda: GradientCache(4)])
def test_a_memory_that_is_split(cbs):
    "Where the loader yields whole batches, each micro-batch goes on from what its own samples left"
    set_seed(0)
    res = quiet(language(8)).twin_check(cbs=cbs())
    assert [o.what for o in res.rows if not o.ok]==['draws','gradients'] and max(res.still.values())<1e-4, res

def test_texts_that_are_padding_at_first():
    "Of the shorter texts, a micro-batch has nothing in the first window of the batch: the encoder runs on no rows"
    lengths = [60,55,50,45,9,8,7,6]   # the longest is of five windows
    rows = [dict(text=' '.join(words[:n]), label='ab'[i%2]) for i,n in enumerate(lengths*2)]
    block = DataBlock((TextBlock.from_df('text', seq_len=12, min_freq=1, tok=BaseTokenizer(), rules=[], n_workers=0),
        CategoryBlock), get_x=lambda r: r.text, get_y=lambda r: r.label, splitter=lambda _: (range(8),range(8, 16)))
    dls = block.dataloaders(pd.DataFrame(rows), bs=8, seq_len=12, num_workers=0, device=cpu)
    res = quiet(text_classifier_learner(dls, AWD_LSTM, config=awd_lstm_clas_config|tiny, pretrained=False,
        seq_len=12)).twin_check()
    where = {o.what:o.where for o in res.rows}
    assert where['predictions']=='BatchNorm1d 1.layers.0.0, 1.layers.1.0' and max(res.still.values())<1e-4, res
