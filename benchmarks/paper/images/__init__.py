"""The Swin-UNet of Zhu and Dong: its memory, table 5, and hearts that it segments, figure 13."""
