"`GradientCache` on Learners as fastai users build them, beside the same Learner without it, in double precision."
import pytest, torch
from functools import partial
from torch.nn import functional as F
from fastai.text.learner import language_model_learner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
from fastai.torch_core import set_seed
from fastaccum import GradientCache
from fastaccum.testing import CrossEntropy, assert_twins
from common import weights
from test_applications import (Encoding, classifier, fine_tune, from_learners, gan_fit, in_double, one_cycle, pictures,
    quiet, same_gan, segmenter, sentiment, tagged, texts, tiny, two_fits, wgan)
from test_cache import clean, nt_xent

def pair(make, fit=one_cycle, size=5, seed=0):
    "The Learner without a cache, and with one"
    def run(cbs):
        set_seed(seed)
        learn = quiet(make())
        before = weights(learn)
        set_seed(seed+1)
        fit(learn, cbs)
        assert clean(learn) and not weights(learn).allclose(before, atol=1e-4)
        return learn
    return run([]),run([GradientCache(size)])

@pytest.mark.parametrize('fit', [fine_tune,two_fits])
def test_vision_learner(fit, pictures):
    assert_twins(*pair(lambda: in_double(classifier(16, pictures, nt_xent)), fit))

def test_unet_with_dice():
    def dice(p, y):
        y = y.long().as_subclass(torch.Tensor).clamp(max=2)
        p,t = p.softmax(1),F.one_hot(y, 3).movedim(-1, 1)
        return 1-(2*(p*t).sum()/(p+t).sum())
    def make():
        learn = in_double(segmenter(8))
        learn.loss_func = dice
        return learn
    assert_twins(*pair(make, size=3))

@pytest.mark.parametrize('make', [wgan,from_learners])
def test_gan(make):
    "The Learner's own call of the model is cached; the loss calls critic and generator, and these are ordinary calls"
    same_gan(*pair(partial(make, 16), gan_fit, size=4))

def test_text_classifier_learner():
    "It returns the outputs of its layers, too, for its callbacks"
    assert_twins(*pair(lambda: in_double(sentiment(16, nt_xent)), fine_tune))

def test_language_model_learner():
    "What an LSTM remembers of each row of the last batch is split, and put together; penalties on its activations"
    def make():
        learn = in_double(language_model_learner(texts(8, True, seq_len=6), AWD_LSTM, config=tiny(awd_lstm_lm_config),
            pretrained=False, alpha=2., beta=1.))
        learn.loss_func = CrossEntropy()
        return learn
    a,b = pair(make, two_fits, size=3)
    assert_twins(a, b)
    assert torch.isfinite(weights(b)).all()

@pytest.mark.parametrize('kind', [dict,Encoding])
def test_dict_batches(kind): assert_twins(*pair(lambda: tagged(16, kind)))

def test_a_model_that_computes_its_loss_is_refused():
    with pytest.raises(TypeError, match=r'shape \(\).*compute the rest .a loss'):
        pair(lambda: tagged(16, dict, with_labels=True))
