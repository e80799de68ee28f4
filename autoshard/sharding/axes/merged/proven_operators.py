"""Lists the operators that may compute rows in another order: with permuted operands, they return permuted results.

A test proves it for each operator. All others keep the order of their rows. A rule says into which shards an operator
may be cut, but an element's result may still depend on its neighbours in the shard.
"""

# `tests/sharding/axes/test_row_order.py` permutes the operands of each, and requires a row for every name.
PROVEN = frozenset(
    """
    abs acos acosh add add_any and approx_top_k argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type broadcast_in_dim cbrt ceil cholesky clamp clz complex concatenate conj
    conv_general_dilated convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum device_put
    digamma div dot_general dynamic_slice dynamic_update_slice eig eigh eq eq_to erf erf_inv erfc exp exp2 expm1
    fft floor gather gather_before_loop gather_once ge geqp3 geqrf gt hessenberg householder_product igamma
    igamma_grad_a igammac
    imag integer_pow is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to lu
    lu_pivots_to_permutation max min mul mulhi name ne neg nextafter not one_minus_square optimization_barrier
    or ormqr pad philox2x32 philox4x32 polygamma population_count pow qr ragged_dot_general random_bits
    random_clone random_fold_in random_gamma random_seed random_unwrap random_wrap real reduce reduce_after_loop
    reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window reduce_window_max
    reduce_window_min reduce_window_sum reduce_xor regularized_incomplete_beta rem reshape reshard rev round
    rsqrt scaled_dot scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub schur
    select_and_gather_add select_and_scatter select_and_scatter_add select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square squeeze stack
    stop_gradient sub svd symmetric_product tan tanh threefry2x32 threefry4x32 tie tile top_k transpose
    triangular_solve tridiagonal tridiagonal_solve unstack xla_metadata_value xor zeta
    """.split()
)
