"Tables and ratings"
from fastai.collab import *
from fastai.tabular.all import *
from sklearn.datasets import load_diabetes
from .data import *

def table(bs, y, **kwargs):
    "Of patients: two columns of classes, three of numbers, some missing"
    data = load_diabetes(as_frame=True, scaled=False).frame[:n_train+n_valid]
    df = data[['age','bmi','bp','sex','target']].copy()
    df['sex'],df['old'] = df.sex.astype(str),(df.age>50).astype(str)
    df.loc[::7,'bmi'] = np.nan
    df['high'] = (df.target>140).astype(str)
    return TabularDataLoaders.from_df(df, procs=[Categorify,FillMissing,Normalize], cat_names=['sex','old'],
        cont_names=['age','bmi','bp'], y_names=y, valid_idx=list(range(n_train, n_train+n_valid)), bs=bs, num_workers=0,
        device='cpu', **kwargs)

@set_up('fastai/fastbook', '09_tabular.ipynb', 'embeddings, regression with a range, `F.mse_loss`',
    by('fit_one_cycle', 2, 1e-2))
def bulldozers(bs):
    dls = table(bs, 'target', y_block=RegressionBlock())
    return tabular_learner(dls, y_range=(25, 350), layers=[50,25], n_out=1, loss_func=F.mse_loss)

class DotProductBias(Module):
    "Factors and biases of users and films"
    def __init__(self, n_users, n_movies, n_factors=6, y_range=(0,5.5)):
        def new(*size): return nn.Parameter(torch.zeros(*size).normal_(0, 0.01))
        self.users,self.user_bias = new(n_users, n_factors),new(n_users)
        self.movies,self.movie_bias,self.y_range = new(n_movies, n_factors),new(n_movies),y_range
    def forward(self, x):
        u,m = x[:,0],x[:,1]
        res = (self.users[u]*self.movies[m]).sum(1)+self.user_bias[u]+self.movie_bias[m]
        return torch.sigmoid(res)*self.y_range[1]

@set_up('fastai/fastbook', '08_collab.ipynb', 'ratings, a model from scratch, weight decay',
    by('fit_one_cycle', 2, 5e-3, wd=0.1))
def movies(bs):
    r = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=r.integers(0, 9, 60), title=r.integers(0, 12, 60), rating=r.integers(1, 11, 60)/2))
    dls = CollabDataLoaders.from_df(df, item_name='title', valid_pct=0.2, seed=0, bs=bs, num_workers=0, device='cpu')
    return Learner(dls, DotProductBias(*(len(dls.classes[o]) for o in ('user','title'))), loss_func=MSELossFlat())

class BatchSwapNoise(Module):
    "Some of the values become those of another row of the batch"
    def __init__(self, p): self.p = p
    def forward(self, x):
        if not self.training: return x
        rows = torch.where(torch.rand(x.shape)>1-self.p, (torch.rand(x.shape)*len(x)).long(), 0)
        return x.gather(0, (torch.arange(len(x))[:,None]+rows)%len(x))

class RecreatedLoss(Module):
    "Sums over the columns of the table, divided by the rows"
    def __init__(self, cats):
        self.cats,self.ce,self.mse = cats,CrossEntropyLossFlat(reduction='sum'),MSELossFlat(reduction='sum')
    def forward(self, preds, cat_targs, cont_targs):
        cats,conts = preds
        ce = sum(self.ce(o, cat_targs[:,i]) for i,o in enumerate(cats.split(self.cats, 1)))
        return (ce/len(self.cats)+self.mse(conts, cont_targs)/conts.shape[1])/len(cats)

class TabularAE(TabularModel):
    "Encodes a row, and decodes it"
    def __init__(self, emb_szs, n_cont, cats):
        super().__init__(emb_szs, n_cont, out_sz=8, layers=[32,16], embed_p=0.01, act_cls=nn.Mish())
        self.noise,self.decoder = BatchSwapNoise(0.1),LinBnDrop(8, 32, p=0.1, act=nn.Mish())
        self.conts,self.cats = nn.Sequential(nn.Linear(32, n_cont), SigmoidRange(-3, 3)),nn.Linear(32, sum(cats))
    def forward(self, x_cat, x_cont):
        x = self.decoder(super().forward(self.noise(x_cat), self.noise(x_cont)))
        return self.cats(x),self.conts(x)

def ae_fit(learn, cbs): learn.fit_flat_cos(2, 4e-3, cbs=[EarlyStoppingCallback(),*cbs])

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/03_tab.ae.ipynb',
    'autoencoder of a table, noise from other rows of the batch', ae_fit,
    still=lambda learn: setattr(learn.model.noise, 'p', 0.))
def autoencoder(bs):
    to = table(full, 'high', y_block=CategoryBlock()).train.dataset
    cats,conts = torch.tensor(to.cats.values).long(),torch.tensor(to.conts.values).float()
    sizes = [len(to.classes[o]) for o in to.cat_names]
    dls = loaders(bs, list(zip(cats, conts, cats, conts)), n=40)
    dls.n_inp = 2
    return Learner(dls, TabularAE(get_emb_sz(to), conts.shape[1], sizes), loss_func=RecreatedLoss(sizes), wd=0.01,
        opt_func=ranger)

class GhostBatchNorm(Module):
    "BatchNorm of a few rows at a time"
    def __init__(self, n, size=4): self.bn,self.size = nn.BatchNorm1d(n, momentum=0.01),size
    def forward(self, x): return torch.cat([self.bn(o) for o in x.split(self.size)])

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/course2020/tabular/04_TabNet.ipynb',
    'ghost BatchNorm, as in TabNet')
def tabnet(bs):
    dls = table(bs, 'high', y_block=CategoryBlock())
    class Net(Module):
        def __init__(self):
            self.embs = nn.ModuleList([nn.Embedding(*o) for o in get_emb_sz(dls.train)])
            n = sum(o.embedding_dim for o in self.embs)+3
            self.body = nn.Sequential(nn.Linear(n, 8), GhostBatchNorm(8), nn.GLU(), nn.Linear(4, 2))
        def forward(self, cats, conts):
            return self.body(torch.cat([*(e(cats[:,i]) for i,e in enumerate(self.embs)), conts], 1))
    return Learner(dls, Net(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
