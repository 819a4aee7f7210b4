/* The activations of mlx-lm's expert layers. */
#ifndef EXPERT_NETWORK_ACTIVATION_H
#define EXPERT_NETWORK_ACTIVATION_H

/* Name, its parameters' number, whether there is a gate. */
#define EACH_ACTIVATION(X)                                          \
    X(SWIGLU, "swiglu", 0, 1)                                       \
    X(SWIGLU_CLIPPED, "swiglu_clipped", 1, 1)                       \
    X(SWIGLU_CLIPPED_AFTER, "swiglu_clipped_after", 1, 1)           \
    X(GPT_OSS, "gpt_oss", 2, 1)                                     \
    X(GEGLU_TANH, "geglu_tanh", 0, 1)                               \
    X(GEGLU_ERF, "geglu_erf", 0, 1)                                 \
    X(GEGLU_FAST, "geglu_fast", 0, 1)                               \
    X(RELU2, "relu2", 0, 0)                                         \
    X(SILU, "silu", 0, 0)                                           \
    X(GELU_TANH, "gelu_tanh", 0, 0)                                 \
    X(GELU_ERF, "gelu_erf", 0, 0)                                   \
    X(GELU_FAST, "gelu_fast", 0, 0)

enum activation {
#define NAME_ONLY(kind, name, parameters, gated) kind,
    EACH_ACTIVATION(NAME_ONLY)
#undef NAME_ONLY
};

#endif
