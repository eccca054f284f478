"Pictures: classifiers, points, segmentation, pairs, boxes"
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from .data import *

def name_of(i): return 'abcdefghij'[classes[i]]

def no_tfms(learn): learn.dls.train.after_batch.fs = learn.dls.valid.after_batch.fs[:1]   # to numbers from 0 to 1

@set_up('fastai/fastbook', '05_pet_breeds.ipynb', 'presizing, `aug_transforms`, `fine_tune`', fine_tune, still=no_tfms)
def pets(bs):
    dls = blocks(bs, ImageBlock, CategoryBlock, get_y=name_of, item_tfms=Resize(24),
        batch_tfms=aug_transforms(size=16, min_scale=0.75))
    return vision_learner(dls, resnet, pretrained=False, metrics=error_rate)

def two_sizes(learn, cbs):
    learn.fit_one_cycle(1, 3e-3, cbs=cbs)
    learn.dls = imagenette(learn.dls.bs, 16, n=50)
    learn.fine_tune(1, 1e-3, cbs=cbs)

def imagenette(bs, size, **kwargs):
    crop = RandomResizedCrop(size, min_scale=0.5)
    return blocks(bs, ImageBlock, CategoryBlock, get_y=name_of, item_tfms=crop, **kwargs)

@set_up('fastai/fastbook', '07_sizing_and_tta.ipynb', 'progressive resizing, with 2 samples left over', two_sizes)
def progressive_resizing(bs):
    return Learner(imagenette(bs, 12, n=50), resnet(), loss_func=LabelSmoothingCrossEntropy(), metrics=accuracy)

@set_up('fastai/fastai', 'nbs/examples/train_imagenette.py', 'xresnet, `ranger`, MixUp, label smoothing',
    by('fit_flat_cos', 2, 4e-3), still=lambda learn: setattr(learn.mix_up, 'run', False),
    alone='the `spectral_norm` of `sa=True`')
def xresnet_mixup(bs):
    net = XResNet(ResBlock, 1, layers=[1]*4, n_out=10, sa=True, act_cls=Mish, stem_szs=(8,8,64),
        widen=0.125)
    return Learner(imagenette(bs, 16), net, loss_func=LabelSmoothingCrossEntropy(), metrics=accuracy, cbs=MixUp(0.4),
        opt_func=partial(ranger, mom=0.95, sqr_mom=0.99, eps=1e-6, beta=0.))

@set_up('fastai/fastbook', '06_multicat.ipynb', 'several labels, `BCEWithLogitsLossFlat`', fine_tune)
def multi_label(bs):
    def labels(i): return [name_of(i), 'even' if classes[i]%2==0 else 'odd']
    dls = blocks(bs, ImageBlock, MultiCategoryBlock, get_y=labels, item_tfms=RandomResizedCrop(16, min_scale=0.35))
    return vision_learner(dls, resnet, pretrained=False, metrics=partial(accuracy_multi, thresh=0.2))

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/course2020/vision/06_Keypoint_Regression.ipynb',
    'key points, three parameter groups, `ranger`', frozen_first('fit_flat_cos', 1e-2, 1e-4))
def key_points(bs):
    def points(i): return TensorPoint(torch.tensor([[i%16, 3.], [8., i%13]]))
    dls = blocks(bs, ImageBlock, PointBlock, get_y=points, item_tfms=Resize(16))
    net = nn.Sequential(resnet()[:3], create_head(32, 4))
    return Learner(dls, net, loss_func=MSELossFlat(), opt_func=ranger,
        splitter=lambda m: [params(o) for o in (m[0][:2], m[0][2:], m[1])])

def masks(i): return (pixels[i,...,0]>90).astype('uint8')+(pixels[i,...,0]>180)

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/course2020/vision/04_Segmentation.ipynb',
    'U-Net, weighted classes', frozen_first('fit_flat_cos', slice(1e-3), slice(1e-3/400, 1e-3/4)))
def camvid(bs):
    dls = blocks(bs, ImageBlock, MaskBlock(['a','b','c']), get_y=masks,
        batch_tfms=Normalize.from_stats(*imagenet_stats))
    def acc_camvid(p, y): return (p.argmax(1)==y)[y!=2].float().mean()
    return unet_learner(dls, resnet, pretrained=False, self_attention=True, act_cls=Mish, opt_func=ranger,
        metrics=acc_camvid, loss_func=CrossEntropyLossFlat(weight=torch.tensor([0.9,0.9,1.1]), axis=1))

class CombinedLoss:
    "Focal loss, and Dice"
    def __init__(self): self.focal,self.dice = FocalLossFlat(axis=1),DiceLoss(axis=1, smooth=1.)
    def __call__(self, pred, targ): return self.focal(pred, targ)+self.dice(pred, targ)

@set_up('fastai/fastai', 'nbs/01a_losses.ipynb', 'segmentation with focal and Dice loss')
def dice(bs):
    dls = blocks(bs, ImageBlock, MaskBlock(['a','b','c']), get_y=masks)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    return Learner(dls, net, loss_func=CombinedLoss())

class Siamese(Module):
    "Are two pictures of the same kind?"
    def __init__(self): self.encoder,self.head = resnet()[:3],create_head(64, 2, ps=0.5)
    def forward(self, a, b): return self.head(torch.cat([self.encoder(a), self.encoder(b)], dim=1))

@set_up('fastai/fastai', 'nbs/24_tutorial.siamese.ipynb', 'pairs of pictures, `freeze` and `unfreeze`',
    frozen_first('fit_one_cycle', 3e-3, slice(1e-6, 1e-4)))
def siamese(bs):
    items = tensors()
    pairs = [(a, items[(i*7)%len(items)]) for i,a in enumerate(items)]
    dls = loaders(bs, [(a[0], b[0], int(a[1]==b[1])) for a,b in pairs])
    def loss(out, targ): return CrossEntropyLossFlat()(out, targ.long())
    return Learner(dls, Siamese(), loss_func=loss, metrics=accuracy,
        splitter=lambda m: [params(m.encoder), params(m.head)])

class Heads(Module):
    "Three classifiers of one picture"
    def __init__(self): self.body,self.heads = resnet()[:3],nn.ModuleList([create_head(32, o) for o in (10,3,2)])
    def forward(self, x):
        y = self.body(x)
        return [o(y) for o in self.heads]

class CombinationLoss(Module):
    "Cross-entropy of several targets"
    def forward(self, xs, *ys, reduction='mean'):
        return sum(w*F.cross_entropy(x, y, reduction=reduction) for w,x,y in zip((2,1,1), xs, ys))

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/course2020/vision/06_Multimodal_Head_and_Kaggle.ipynb',
    'three heads and three targets')
def three_heads(bs):
    dls = blocks(bs, ImageBlock, *[CategoryBlock]*3, n_inp=1,
        getters=[pixels.__getitem__, name_of, lambda i: classes[i]%3, lambda i: classes[i]%2])
    return Learner(dls, Heads(), loss_func=CombinationLoss())

class SimpleModel(Module):
    "A recurrent network on what a small network sees in each frame"
    def __init__(self):
        self.encoder,self.lstm,self.head = conv(12),nn.LSTM(12, 8, batch_first=True),nn.Linear(8, 10)
    def forward(self, frames): return self.head(self.lstm(torch.stack([self.encoder(o) for o in frames], 1))[0][:,-1])

@set_up('fastai/fastai', 'nbs/24_tutorial.image_sequence.ipynb', 'a tuple of frames as the input')
def video(bs):
    items = tensors()
    return Learner(loaders(bs, [(tuple(items[(i+k)%52][0] for k in range(3)), y) for i,(_,y) in enumerate(items)]),
        SimpleModel(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

class FeatureLoss(Module):
    "How far the features of a fixed network are apart, and those of their styles"
    def __init__(self):
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, 2), nn.ReLU()).requires_grad_(False)
        self.hooks = hook_outputs([self.net[1],self.net[3]], detach=False)
    def features(self, x):
        self.net(x)
        return list(self.hooks.stored)
    def gram(self, x): return x.flatten(2)@x.flatten(2).transpose(1, 2)/x[0].numel()
    def forward(self, pred, targ):
        a,b = self.features(pred),self.features(targ)
        self.act_loss = F.mse_loss(a[-1], b[-1])
        self.stl_loss = 100*sum(F.mse_loss(self.gram(x), self.gram(y)) for x,y in zip(a, b))
        return self.act_loss+self.stl_loss

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/course2020/vision/05_Style_Transfer.ipynb',
    'loss of features from hooks, `LossMetrics`')
def style_transfer(bs):
    net = nn.Sequential(ConvLayer(3, 8, norm_type=None), ConvLayer(8, 3, norm_type=None, act_cls=None))
    return Learner(loaders(bs, [(x, x.flip(-1)) for x,_ in tensors()]), net, loss_func=FeatureLoss(),
        metrics=LossMetrics('stl_loss,act_loss'))

class Retina(Module):
    "For each of the cells of a grid: is there something, and where?"
    def __init__(self):
        self.body,self.classifier,self.box_regressor = resnet()[:2],nn.Conv2d(16, 2, 3, padding=1),nn.Conv2d(16, 4, 1)
    def forward(self, x):
        x = self.body(x)
        return [o(x).flatten(2).transpose(1, 2) for o in (self.classifier,self.box_regressor)]

class RetinaNetFocalLoss(Module):
    "Focal loss of the cells, and distance of the boxes; those of class 0 only fill up"
    def one(self, clas, box, b, c):
        b,c = b[c>0],c[c>0]
        gap = torch.cdist((b[:,:2]+b[:,2:])/2, torch.cartesian_prod(*[torch.linspace(-0.75, 0.75, 4)]*2))
        best,targ = gap.argmin(1),torch.zeros_like(clas)
        targ[best,c-1] = 1.
        p = clas.sigmoid().detach()
        focal = F.binary_cross_entropy_with_logits(clas, targ, (targ*(1-p)+(1-targ)*p)**2, reduction='sum')
        return (F.smooth_l1_loss(box[best], b)+focal)/max(len(b), 1)
    def forward(self, out, b, c): return sum(self.one(*o) for o in zip(*out, b, c))/len(b)

@set_up('walkwithfastai/walkwithfastai.github.io', 'nbs/course2020/vision/06_Object_Detection.ipynb',
    'boxes, padded to those of the batch', by('fit_one_cycle', 2, slice(1e-4, 3e-3)))
def boxes(bs):
    def corners(i): return [[k, i%5, k+6, 14] for k in range(1+i%3)]
    dls = blocks(bs, ImageBlock, BBoxBlock, BBoxLblBlock, n_inp=1,
        getters=[pixels.__getitem__, corners, lambda i: ['ab'[i%2]]*(1+i%3)])
    learn = Learner(dls, Retina(), loss_func=RetinaNetFocalLoss(),
        splitter=lambda m: [params(m.body), params(m.classifier)+params(m.box_regressor)])
    learn.freeze()
    return learn

def convnext(pretrained=False):
    net = ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=2)
    return nn.Sequential(*net.features, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, 2))

@set_up('fastai/course22', '10-scaling-up-road-to-the-top-part-3.ipynb', 'ConvNeXt as timm has it, `fine_tune`',
    fine_tune, still=no_tfms)
def paddy(bs):
    dls = blocks(bs, ImageBlock, CategoryBlock, get_y=name_of, item_tfms=Resize(32, method='squish'),
        batch_tfms=aug_transforms(size=16, min_scale=0.75))
    return vision_learner(dls, convnext, pretrained=False, metrics=error_rate)
