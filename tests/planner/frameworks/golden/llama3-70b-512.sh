# Megatron-LM (0.20.0); names are those of NVIDIA/Megatron-LM, commit d98e8a6 of 22 August 2026
# fill in --data-path, --tokenizer-type and --tokenizer-model, which sets the vocabulary (128,256), --save, --load, and torchrun's rendezvous
# --tp-comm-overlap needs Transformer Engine's user buffers, within a node
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 --nnodes 64 pretrain_gpt.py \
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
    --kv-channels 128 --group-query-attention --num-query-groups 8 --seq-length 8192 \
    --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 \
    --normalization RMSNorm --norm-epsilon 1e-05 --swiglu --disable-bias-linear \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 1 \
    --num-virtual-stages-per-pipeline-rank 4 --sequence-parallel --tp-comm-overlap \
    --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce \
    --recompute-granularity full --recompute-method block --recompute-num-layers 1 \
    --micro-batch-size 1 --global-batch-size 512 --bf16 --transformer-impl transformer_engine \
    --cross-entropy-loss-fusion --train-iters 100000 --lr 0.00015 --min-lr 1.5e-05 \
    --lr-decay-style cosine --lr-warmup-iters 2000 --lr-decay-iters 100000 --weight-decay 0.1 \
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-08 --clip-grad 1
