// Runs layer parts one after another in one call, and the head after them. Between the parts of a small model a caller takes
// longer than the parts themselves. Included by packed_cpu.cpp after experts_part.h.

#pragma once

#include "experts_part.h"
#include "latent_part.h"
#include "layer.h"
#include "recurrent_part.h"

namespace {

// The structures are mirrored by layer.py.
enum StepKind : int64_t {
    ATTENTION_STEP, MLP_STEP, EXPERTS_STEP, PARALLEL_STEP, PER_LAYER_STEP, DELTA_STEP, CONVOLUTION_STEP, LATENT_STEP, MAMBA_STEP,
    CHANNEL_DELTA_STEP, MIXERS_STEP, SELECTIVE_STEP
};
struct Step {
    int64_t kind;
    const void* part;   // AttentionPart and so on
    const void* cache;  // LayerCache of attention, LayerStates of a recurrent layer, MixerCaches of both, null otherwise
};
struct Head {  // from the stream to logits
    NormParams norm;
    Linear product;
};

inline int run_step(const Step& step, const PassRows& pass, const Rowwise& rowwise, const uint16_t* x, uint16_t* out) {
    const LayerCache* cache = static_cast<const LayerCache*>(step.cache);
    const LayerStates* states = static_cast<const LayerStates*>(step.cache);
    switch (step.kind) {
        case ATTENTION_STEP: return AttentionRun{*static_cast<const AttentionPart*>(step.part), pass, *cache, rowwise}.run(x, out);
        case LATENT_STEP: return LatentRun{*static_cast<const LatentPart*>(step.part), pass, *cache, rowwise}.run(x, out);
        case MLP_STEP: return run_mlp(*static_cast<const MlpPart*>(step.part), rowwise, x, out);
        case PARALLEL_STEP: return run_parallel(*static_cast<const ParallelPart*>(step.part), pass, *cache, rowwise, x, out);
        case PER_LAYER_STEP: return run_per_layer(*static_cast<const PerLayerPart*>(step.part), pass, rowwise, x, out);
        case DELTA_STEP: return RecurrentRun{pass, *states, rowwise}.run(*static_cast<const DeltaPart*>(step.part), x, out);
        case MAMBA_STEP: return RecurrentRun{pass, *states, rowwise}.run(*static_cast<const MambaPart*>(step.part), x, out);
        case CHANNEL_DELTA_STEP: return RecurrentRun{pass, *states, rowwise}.run(*static_cast<const ChannelDeltaPart*>(step.part), x, out);
        case SELECTIVE_STEP: return RecurrentRun{pass, *states, rowwise}.run(*static_cast<const SelectivePart*>(step.part), x, out);
        case CONVOLUTION_STEP: return RecurrentRun{pass, *states, rowwise}.run(*static_cast<const ConvolutionPart*>(step.part), x, out);
        case MIXERS_STEP:
            return run_mixers(*static_cast<const ParallelMixersPart*>(step.part), pass, *static_cast<const MixerCaches*>(step.cache),
                              rowwise, x, out);
        default: return ExpertsRun{*static_cast<const ExpertsPart*>(step.part), rowwise}.run(x, out);
    }
}

// In place: a part reads each value of the stream for the last time where it writes it, so all parts after the first read `out`.
inline int run_chain(const Step* steps, int64_t count, const PassRows& pass, int threads, const uint16_t* x, uint16_t* out) {
    for (int64_t i = 0; i < count; i++)
        if (const int failed = run_step(steps[i], pass, {pass.rows, threads}, i ? out : x, out)) return failed;
    return 0;
}

// x [rows, inputs], normed, to y [rows, outputs]. Returns 0, or 1 without memory.
inline int multiply_head(const Head& head, const Rowwise& rowwise, const uint16_t* x, uint16_t* y) {
    const int64_t inputs = rowwise.rows * head.product.parts[0].inputs;
    Scratch scratch(inputs + rowwise.rows * head.product.outputs);
    if (!scratch.at) return 1;
    const uint16_t* input = rowwise.norm_input(head.norm, x, scratch.take(inputs));
    return rowwise.multiply(head.product, input, y, scratch.take(rowwise.rows * head.product.outputs)) ? 0 : 1;
}

}  // namespace
