"""Warnings and the result of `accum_check` are true, for Learners as fastai users build them.

Each Learner is trained on full batches and on micro-batches. Whether both runs arrive at the same
weights must agree with the warnings and the check. The runs are in double precision, so that rounding is
much smaller than the difference of a wrong run.
"""
import pytest
from functools import partial
from fastai.losses import FocalLossFlat
from fastai.text.all import (AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config, language_model_learner,
    text_classifier_learner)
from fastai.vision.all import BnFreeze, DiceLoss, SGD, set_seed
from fastaccum import GradientAccumulation, AccumulationWarning
from common import collect_warnings, weights
from small_learners import DoubleMixUp, MixUpLoss
from test_applications import (detection, few_critic_steps, groupnorm_in, in_double, linear, n_tokens, ratings,
    segmenter, small, table, tagged, texts, vision)

def frozen(bs):
    "Return a Learner that trains its head only, with the statistics of BatchNorm frozen"
    learn = vision(bs, train_bn=False, cbs=BnFreeze(), custom_head=linear(128))
    learn.freeze()
    return learn

def mixed_loss(pred, targ):
    "Return the sum of a mean over samples and a Dice loss over the batch, as in fastai's documentation"
    targ = targ.clamp(max=2)
    return FocalLossFlat(axis=1)(pred, targ)+DiceLoss(axis=1, smooth=1.)(pred, targ)

def sentiment(bs):
    """Return a classifier of texts of very different lengths

    Some batches have no rows in the encoder's first window.
    """
    return text_classifier_learner(texts(bs, False, sizes=(60,55,9,7,6), seq_len=12), AWD_LSTM, pretrained=False,
        config=awd_lstm_clas_config|small, seq_len=12)

def language(bs):
    return language_model_learner(texts(bs, True), AWD_LSTM, config=awd_lstm_lm_config|small, pretrained=False)

hugging = partial(tagged, with_labels=True)
bn,norms = {'BatchNormWarning'},['predictions','gradients','model state']
# Each case: a function that takes a batch size and returns a Learner; the classes of the warnings of its
# fit, or None for any; the rows of `accum_check` that fail
real = dict(
    vision=(vision, bn, ['predictions','random numbers','gradients','model state']),
    vision_frozen=(frozen, set(), []),
    vision_mixup=(lambda bs: groupnorm_in(vision(bs, ps=0., cbs=DoubleMixUp(), loss_func=MixUpLoss())), None,
        ['callbacks','gradients']),
    unet=(segmenter, bn, norms),
    unet_mixed_loss=(lambda bs: groupnorm_in(segmenter(bs, mixed_loss)), {'LossWarning'}, ['loss','gradients']),
    sentiment=(sentiment, bn|{'LoaderWarning'}, ['predictions','random numbers','loader','gradients','model state']),
    language=(language, {'LoaderWarning','StateWarning'}, ['predictions','random numbers','loader','gradients']),
    table=(partial(table, config=None, loss_func=None), bn, norms),
    collab=(partial(ratings, loss_func=None), set(), []), gan=(few_critic_steps, set(), []),
    detection=(partial(detection, n=32), set(), []),
    hugging=(tagged, set(), []), hugging_loss=(hugging, {'LossWarning'}, ['loss','gradients']),
    hugging_size=(hugging, set(), []))

def made(nm, bs):
    set_seed(0)
    learn = in_double(real[nm][0](bs))
    if nm!='gan': learn.opt_func = SGD   # Adam would take full steps where gradients are rounding errors
    return learn

def trained(nm, bs, cbs):
    "Return the weights before and after a fit, and the categories of its warnings"
    learn = made(nm, bs)
    start = weights(learn)
    set_seed(1)
    with collect_warnings() as seen: learn.fit(1, 1e-3 if nm=='gan' else 1e-2, cbs=cbs)
    return start,weights(learn),{o.category.__name__ for o in seen if issubclass(o.category, AccumulationWarning)}

@pytest.mark.parametrize('nm', real)
def test_warnings_and_check_agree_with_the_runs(nm):
    _,expected,rows = real[nm]
    # with four sorted batches only, both runs could have the same batches by chance
    full = 8 if nm=='sentiment' else 16
    def acc(): return GradientAccumulation(full, n_items=n_tokens if nm=='hugging_size' else None)
    (start,a,none),(_,b,warned) = trained(nm, full, []),trained(nm, 4, [acc()])
    apart = ((a-b).norm()/(a-start).norm()).item()
    res = made(nm, 4).accum_check(cbs=acc())
    assert [o.what for o in res.rows if not o.ok]==rows, res
    # the check compares the loss in all cases but one, in which the model computes the loss
    if nm!='hugging_loss': assert not any(o.what=='loss' and o.off is None for o in res.rows), res
    # the same runs are about 1e-13 apart, different runs 0.1
    assert res.ok==(not rows)==(apart<1e-4), (apart, res)
    assert not none and (expected is None or warned==expected), warned
