"""Train a language model on batches of 32 texts of which the model sees 8 at a time."""
from pydoc_data.topics import topics   # the language reference that comes with Python
from fastai.text.all import *
from fastaccum import GradientAccumulation  # isort: skip

def train(cbs=None):
    set_seed(0)
    dls = TextDataLoaders.from_df(df, text_col='text', is_lm=True, seed=0, bs=32, seq_len=32, num_workers=0)
    # `drop_mult` turns dropout off, so that both runs are comparable: leave it out of your code
    learn = language_model_learner(dls, AWD_LSTM, config=small, pretrained=False, drop_mult=1e-30,
        metrics=Perplexity())
    learn.fit_one_cycle(2, 1e-2, cbs=cbs)
    return learn

if __name__ == '__main__':   # fastai starts processes that tokenize, and each imports this file
    paragraphs = [p for topic in sorted(topics) for p in topics[topic].split('\n\n')]
    df = pd.DataFrame({'text': paragraphs[:300]})
    small = awd_lstm_lm_config | dict(emb_sz=48, n_hid=48, n_layers=2)
    # the loader keeps `bs=32`, because it cuts the text into as many streams as a batch has texts
    learn = train(GradientAccumulation(32, micro_batch_size=8))
    full = train()   # the model sees all 32 texts at once
    a, b = (o.recorder.values[-1][-1] for o in (learn, full))
    assert abs(a-b) < 1e-2*b
    print(f'perplexity {a:.2f} in micro-batches of 8, {b:.2f} in whole batches of 32')
