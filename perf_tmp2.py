import torch,time
torch.set_num_threads(2)
fl=torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flb=torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
def T(f,r=5):
    f(); ts=[]
    for _ in range(r):
        t=time.perf_counter(); f(); ts.append(time.perf_counter()-t)
    return min(ts)
d=64; pairs=32768
for m in (16,32,64,128,256):
  for t in (32,64,128,256,512):
    B=pairs//t
    q=torch.randn(B,1,t,d); k=torch.randn(B,1,m,d); v=torch.randn(B,1,m,d)
    mask=torch.zeros(B,1,1,m)
    a=T(lambda:fl(q,k,v,0.0,False,scale=1.0))
    a2=T(lambda:fl(q,k,v,0.0,False,attn_mask=mask,scale=1.0))
    q3,k3,v3=q[:,0],k[:,0],v[:,0]
    def plain():
        z=torch.bmm(q3,k3.transpose(1,2)); mx=z.amax(-1,True); z.sub_(mx).exp_(); s=z.sum(-1); return torch.bmm(z,v3),s
    def plain2():
        z=torch.baddbmm(mx0,q3,k3.transpose(1,2)); z.exp_(); s=z.sum(-1); return torch.bmm(z,v3),s
    mx0=-torch.full((B,t,1),10.)
    b=T(plain); c=T(plain2)
    o,l=fl(q,k,v,0.0,False,scale=1.0); g=torch.randn_like(o)
    e=T(lambda:flb(g,q,k,v,o,l,0.0,False,scale=1.0))
    print(f'm {m} T {t}: flash {a/pairs*1e9:.0f} ns/pair masked {a2/pairs*1e9:.0f} plain {b/pairs*1e9:.0f} fixedref {c/pairs*1e9:.0f} bwd {e/pairs*1e9:.0f}',flush=True)
num=torch.zeros(32768,64); idx=torch.randint(0,32768,(pairs,)); x=torch.randn(pairs,64); n2=torch.randn(131072,64); i2=torch.randint(0,131072,(pairs,))
print('index_select',T(lambda:n2.index_select(0,i2))/pairs*1e9,'index_add',T(lambda:n2.index_add_(0,i2,x))/pairs*1e9,'index_copy',T(lambda:n2.index_copy_(0,i2,x))/pairs*1e9, 'scatter_reduce amax',T(lambda:torch.zeros(131072).scatter_reduce_(0,i2,x[:,0],'amax'))/pairs*1e9,'index_add 1d',T(lambda:torch.zeros(131072).index_add_(0,i2,x[:,0]))/pairs*1e9)
big=torch.randint(0,1024,(2097152,)); b32=big.int(); b16=big.short()
print('argsort 2M int64',T(lambda:big.argsort(stable=True),2),'int32',T(lambda:b32.sort(stable=True),2),'int16',T(lambda:b16.sort(stable=True),2))
s=torch.randn(8192,1024)
print('topk16/1024',T(lambda:s.topk(16,-1,sorted=False))/s.numel()*1e9,'max',T(lambda:s.amax(-1))/s.numel()*1e9, 'kthvalue', T(lambda:s.kthvalue(1000,-1))/s.numel()*1e9)
def two():
    g=s.view(8192,16,64).amax(1); gi=g.topk(16,-1,sorted=False).indices  # groups strided: col j -> cells j, j+64,...
    c=s.view(8192,16,64).gather(2,gi[:,None,:].expand(-1,16,-1)).reshape(8192,-1); t=c.topk(16,-1,sorted=False).indices
    return t//16*64+gi.gather(1,t%16)
print('two-stage',T(two)/s.numel()*1e9)
def three():
    g=s.view(8192,8,128).amax(1); gi=g.topk(16,-1,sorted=False).indices
    c=s.view(8192,8,128).gather(2,gi[:,None,:].expand(-1,8,-1)).reshape(8192,-1); t=c.topk(16,-1,sorted=False).indices
    return t//16*128+gi.gather(1,t%16)
print('two-stage8',T(three)/s.numel()*1e9)
print('exp',T(lambda:s.exp())/s.numel()*1e9,'sub_exp_',T(lambda:s.clone().sub_(1.).exp_())/s.numel()*1e9,'sqrt',T(lambda:s.abs().sqrt())/s.numel()*1e9,'scatter',T(lambda:s.scatter_(1,torch.zeros(8192,16,dtype=torch.long),0.))/8192*1e9)
