"What an adapter of a peer has, for `right` and `fast`."
class CannotExpress(Exception):
    "The peer has no way to say what the case asks for; the message says why"

class Peer:
    "A way to accumulate gradients"
    key,title,package = None,None,None   # names it; for people; the distribution whose version is reported
    how,docs = '',''                     # the settings it is run with, and the page that says so

    def start(self, case, model):
        "Make what outlives a fit"
        self.case,self.model = case,model

    def fit(self, data, epochs, micro, accum):
        "Train in micro-batches of `micro`, with steps of `accum` samples"
        raise NotImplementedError

    def twin_size(self, micro, accum):
        "The size of the real batches to compare with: the micro-batch that reaches `accum` is the last of a step"
        return -(-accum//micro)*micro

    def make_model(self, case):
        "A model of the peer's own, where the peer is about one"
        from .cases import make_model
        return make_model(case)

    def losses(self):
        "The losses that the last fit recorded, or None if recording is left to the user"
    def recorded_as(self, losses):
        "What `losses` of the steps would be recorded as"
        return losses

def whole(micro, accum):
    "The number of micro-batches in a step, where that is what the peer wants to know"
    if accum%micro:
        k = accum//micro
        raise CannotExpress(f'takes a number of micro-batches ({k} or {k+1} of {micro}), not of samples')
    return accum//micro
