"""Train a language model on batches of 32 texts of which the model sees 8 at a time."""
import random
from fastai.text.all import *
from fastaccum import GradientAccumulation  # isort: skip

rng = random.Random(0)
def pick(options): return options[int(rng.random()*len(options))]

def review():   # made up, so that this script needs no download
    thing = pick(['film', 'book', 'play'])
    parts, adjectives = ['plot', 'start', 'end'], ['good', 'dull', 'funny']
    return ' '.join(f'The {pick(parts)} of this {thing} was {pick(adjectives)}.' for _ in range(pick(range(1, 10))))

def train(cbs=None):
    set_seed(0)
    dls = TextDataLoaders.from_df(df, text_col='text', is_lm=True, seed=0, bs=32, seq_len=32, num_workers=0)
    # `drop_mult` turns dropout off, so that both runs are comparable: leave it out of your code
    learn = language_model_learner(dls, AWD_LSTM, config=small, pretrained=False, drop_mult=1e-30,
        metrics=Perplexity())
    learn.fit_one_cycle(2, 1e-2, cbs=cbs)
    return learn.recorder.values[-1][-1]

if __name__ == '__main__':   # fastai starts processes that tokenize, and each imports this file
    df = pd.DataFrame({'text': [review() for _ in range(300)]})
    small = awd_lstm_lm_config | dict(emb_sz=48, n_hid=48, n_layers=2)
    # the loader keeps `bs=32`, because it cuts the text into as many streams as a batch has texts
    ours = train(GradientAccumulation(32, micro_batch_size=8))
    full = train()   # the model sees all 32 texts at once
    assert abs(ours-full) < 1e-3*full
    print(f'perplexity {ours:.2f} in micro-batches of 8, {full:.2f} in whole batches of 32')
