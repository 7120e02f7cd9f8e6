/* SPDX-License-Identifier: Apache-2.0
 *
 * The verbs in C, for other languages: plain pointers, no allocation of results, no exceptions. Functions, names and
 * the layout of what stands here do not change before version 1 but by addition.
 *
 * Matrices are C-contiguous, (rows, columns). Memory is the caller's, at a multiple of the size of what it holds;
 * nothing is kept after a call but a recipe, which is immutable and may be used by any threads at once. Every function
 * that returns breccia_status gives BRECCIA_OK, or the class of the mistake, whose sentence breccia_last_message() then
 * has.
 */
#ifndef BRECCIA_C_H
#define BRECCIA_C_H

#include <stddef.h>
#include <stdint.h>

#if !defined(BRECCIA_SHARED)
#define BRECCIA_C_API
#elif defined(_WIN32) && defined(BRECCIA_BUILDING)
#define BRECCIA_C_API __declspec(dllexport)
#elif defined(_WIN32)
#define BRECCIA_C_API __declspec(dllimport)
#else
#define BRECCIA_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Names are those of C: types in lower case, constants in capitals.
 * NOLINTBEGIN(readability-identifier-naming) */
/** What a call came to: one of the constants below. */
typedef int32_t breccia_status;
enum {
    BRECCIA_OK = 0,
    BRECCIA_VALUE_ERROR = 1, /**< a wrong value, size or null pointer */
    BRECCIA_TYPE_ERROR = 2,  /**< a wrong type of numbers or of a recipe's field */
    BRECCIA_NO_MEMORY = 3,
    BRECCIA_INTERNAL_ERROR = 4
};

/** Types of numbers. Float16 and bfloat16 are IEEE binary16 and the upper half of a float, two bytes each. */
typedef int32_t breccia_dtype;
enum { BRECCIA_FLOAT32 = 0, BRECCIA_FLOAT64 = 1, BRECCIA_FLOAT16 = 2, BRECCIA_BFLOAT16 = 3 };

/** The sentence of the last error of this thread; valid until its next call. "" where there was none. */
BRECCIA_C_API const char *breccia_last_message(void);

/** "0.4.0", of the library that is linked. */
BRECCIA_C_API const char *breccia_version(void);

/** A recipe, made and given back by the functions below. */
typedef struct breccia_recipe breccia_recipe;

/** A recipe by name ("nvfp4", "MXFP8BlockScaling"). `fields` is NULL, or text such as "two_level=false" or
 * "group_size=32,scale_dtype=bf16". Give it back with breccia_recipe_free. */
BRECCIA_C_API breccia_status breccia_recipe_new(const char *name, const char *fields, breccia_recipe **recipe);
/** NULL is let through. */
BRECCIA_C_API void breccia_recipe_free(breccia_recipe *recipe);

/** A matrix of numbers, where `recipe` is NULL: `data` holds rows * columns of type `dtype`. Otherwise a quantized one,
 * its parts as breccia_part_sizes says; parts that the recipe has not are NULL, and `dtype` is not looked at. */
typedef struct breccia_matrix {
    const breccia_recipe *recipe; /**< NULL: numbers */
    breccia_dtype dtype;          /**< of numbers */
    int32_t transposed;           /**< not 0: stands for its transpose; of operands of breccia_matmul only */
    int64_t rows;                 /**< as stored */
    int64_t columns;              /**< as stored, in elements */
    void *data;                   /**< numbers or codes */
    void *scale;                  /**< scales of blocks */
    void *zero_point;             /**< zero points of blocks */
    void *global_scale;           /**< one float */
} breccia_matrix;

/** Bytes of each part of a matrix; 0 for a part that the recipe has not. */
typedef struct breccia_part_bytes {
    int64_t data;         /**< codes */
    int64_t scale;        /**< scales of blocks */
    int64_t zero_point;   /**< zero points of blocks */
    int64_t global_scale; /**< one float */
} breccia_part_bytes;
/** Of a matrix (rows, columns) by that recipe. */
BRECCIA_C_API breccia_status breccia_part_sizes(const breccia_recipe *recipe, int64_t rows, int64_t columns,
                                                breccia_part_bytes *sizes);

/** x: numbers; out: quantized, of the same shape. */
BRECCIA_C_API breccia_status breccia_cast(const breccia_matrix *x, const breccia_matrix *out);
/** The same by importance, numbers (1, columns): scales are those of the least sum over all elements of
 * importance * error^2. What is zero or no finite number takes the mean of the others. */
BRECCIA_C_API breccia_status breccia_cast_by_importance(const breccia_matrix *x, const breccia_matrix *importance,
                                                        const breccia_matrix *out);
/** scaled: quantized; out: numbers, of the same shape. */
BRECCIA_C_API breccia_status breccia_dequantize(const breccia_matrix *scaled, const breccia_matrix *out);
/** Both quantized, of the same shape. */
BRECCIA_C_API breccia_status breccia_requantize(const breccia_matrix *scaled, const breccia_matrix *out);
/** a (M, K) @ b (K, N) into numbers (M, N); either operand of either kind. */
BRECCIA_C_API breccia_status breccia_matmul(const breccia_matrix *a, const breccia_matrix *b,
                                            const breccia_matrix *out);
/** x (M, K) @ transpose of w (N, K) into numbers (M, N), plus `bias`, NULL or numbers (1, N). */
BRECCIA_C_API breccia_status breccia_linear(const breccia_matrix *x, const breccia_matrix *w,
                                            const breccia_matrix *bias, const breccia_matrix *out);

/* NOLINTEND(readability-identifier-naming) */

#ifdef __cplusplus
}
#endif

#endif
